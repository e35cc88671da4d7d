"""What tables of comparisons compare can be built: each served form of each table is a recipe, and its stages run."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from models import catalog
from models.core.checkpoints.invariants import noted, require
from models.core.checkpoints.loading import load_floats, load_model
from models.core.layers.linears import blocks
from tasks.measure import chain
from tasks.measure.comparisons import Bench, Row, adapters, prune, quantize, regimes, select, shrink
from tasks.measure.comparisons import all as forms
from tasks.stages.change_target import Changed, Start
from tests.tasks.made import recipe_of
from tests.tasks.measure.benches import random_texts

pytestmark = pytest.mark.slow

TEXT = {"source": {"name": "synthetic", "count": 60}, "num_train": 30, "num_held_out": 10}
HALF = {"pattern": "2:4", "num_documents": 8, "max_length": 48}
SHORT = {"max_length": 48, "batch_tokens": 192}


UNREAD = re.compile(r'\[(?P<table>\w+)\]: key "(?P<key>\w+)" would do nothing')


def bench(target: Path, work_dir: Path) -> Bench:
    texts = random_texts(8, 48, ("chat", "code"))
    return Bench(target, texts, texts, 0.1, work_dir)


def recipe(tables: dict[str, Any], engine: str = "vllm") -> None:
    """Parse a recipe with these tables, but for keys that rows of a comparison share and one's method does not read."""
    tiny: dict[str, Any] = {"text": {"chat": TEXT, "code": TEXT}}
    if engine != "vllm":
        tiny |= {"engine": {"name": engine, "num_draft_tokens": 2}, "serve": None, "demo": None}
    read = {name: dict(table) for name, table in tables.items()}
    while True:
        try:
            recipe_of(**tiny, **read)
        except ValueError as error:
            if (unread := UNREAD.search(str(error))) is None:
                raise
            del read[unread["table"]][unread["key"]]
        else:
            return


def single_stages() -> Iterator[tuple[str, dict[str, Any]]]:
    """Name and tables of each row of the families' tables that changes the target in one stage and can be served."""
    for row in prune.rows(1):
        if row.settings.get("method") and row.settings["pattern"] == "2:4" and "text" not in row.settings:
            yield row.name, {"prune": {**HALF, "method": row.settings["method"]}}
    sizes = {"num_layers": 1, "num_heads": 1, "num_kv_heads": 1, "intermediate_size": 128}
    for row in shrink.rows(0.005):
        method = row.settings["method"]
        if method and not row.settings["trained"] and catalog.load("shrink", method["name"]).KEEPS_TOKENS:
            asked = {key: sizes[key] for key in row.settings["sizes"]}
            yield row.name, {"shrink": {"method": {**method, **asked}, **SHORT}}
    for row in quantize.rows(1):
        method = row.settings.get("method")
        if row.settings["model"] == "target" and method and catalog.load("quantize", method["name"]).STORED:
            exceptions = {key: row.settings[key] for key in ("exceptions",) if key in row.settings}
            table = {"method": method, "num_documents": 8, **SHORT, **exceptions}
            first = {"prune": {**HALF, "method": row.settings["prune"]}} if "prune" in row.settings else {}
            if "text" not in row.settings:
                yield row.name, {**first, "quantize": table}
    for row in adapters.rows(1):
        if row.settings["adapter"] and hasattr(catalog.load("adapters", row.name), "fold"):
            method = {**row.settings["adapter"], **({"num_layers": 1} if row.name == "last_layers" else {})}
            yield row.name, {"finetune": {"method": method, "domain": "chat", **SHORT}}


SINGLE = list(single_stages())


@pytest.mark.parametrize(("name", "tables"), SINGLE, ids=[name for name, _ in SINGLE])
def test_a_row_of_a_familys_table_is_built(
    name: str, tables: dict[str, Any], tiny_target: Path, tmp_path: Path
) -> None:
    recipe(tables, engine="torch" if "low_rank" in name else "vllm")
    made = chain.make(bench(tiny_target, tmp_path), tables, seed=0)
    assert made.parent == tmp_path and (made / "chat_template.jinja").is_file()
    load_model(made)
    require(load_floats(made))


@pytest.mark.parametrize("row", forms.rows(0.05)[1:], ids=lambda row: row.name)
def test_a_row_of_the_view_over_families_is_built(row: Row, tiny_target: Path, tmp_path: Path) -> None:
    tables = forms.recipe_tables(row, tiny_target)
    recipe(tables)
    made = chain.make(bench(tiny_target, tmp_path), tables, seed=0)
    require(load_floats(made))
    assert made.name == list(tables)[-1]


def test_every_regime_and_selection_of_a_table_is_a_recipe() -> None:
    for row in regimes.rows(1):
        recipe({"pretrain": {"regimes": [row.settings["method"]] if row.settings["method"] else []}})
    for row in select.rows(1):
        drafts = catalog.load("select", row.name).DRAFTS
        proxy = {"proxy": {"name": "random", "num_layers": 1}} if drafts else {}
        recipe({"select": {"method": row.settings["method"], "num_documents": 8, **proxy}, "pretrain": {}})


def test_a_pattern_is_held_through_finetuning_and_rounding_and_a_seed_makes_one_target(
    tiny_target: Path, tmp_path: Path
) -> None:
    tables = {
        "prune": {**HALF, "method": {"name": "wanda"}},
        "finetune": {"method": {"name": "lora"}, "domain": "chat", **SHORT},
        "quantize": {"method": {"name": "gptq", "group_size": 64}, "num_documents": 8, "max_length": 48},
    }
    made = []
    for number, seed in enumerate((0, 0, 1)):
        (tmp_path / f"{number}").mkdir()
        made.append(chain.make(bench(tiny_target, tmp_path / f"{number}"), tables, seed))
    first, again, other = (load_floats(directory).state_dict() for directory in made)
    layer = "model.layers.1.mlp.down_proj.weight"
    assert int((first[layer].unflatten(1, (-1, 4)) == 0).sum(-1).min()) >= 2
    assert torch.equal(first[layer], again[layer]) and not torch.equal(first[layer], other[layer])


def test_a_chain_that_forgets_what_a_stage_promised_is_refused(
    tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forget(table: object, seed: int, start: Start) -> Changed:
        del start.model.config.redraft
        return Changed(start.model, {})

    monkeypatch.setattr(chain, "CHANGES", {**chain.CHANGES, "finetune": forget})
    tables = {
        "prune": {**HALF, "method": {"name": "magnitude"}},
        "finetune": {"method": {"name": "lora"}, "domain": "chat"},
    }
    with pytest.raises(ValueError, match=r"promised of layer model\.layers\.0\.mlp\.down_proj is not noted any more"):
        chain.make(bench(tiny_target, tmp_path), tables, seed=0)


@pytest.mark.parametrize("name", shrink.CHAINS)
def test_a_chain_of_the_table_of_shapes_is_a_recipe_whose_shape_or_rank_is_there_at_the_end(
    name: str, tiny_target: Path, tmp_path: Path
) -> None:
    one = bench(tiny_target, tmp_path)
    tables = shrink.chain_tables(name, one, 1e-3)
    recipe(tables, engine="torch" if "low_rank" in name else "vllm")
    model = load_floats(chain.make(one, tables, seed=0))
    require(model)
    ranks = noted(model.config).ranks
    assert len(blocks(model)) == (1 if "depth" in name else 2) and len(ranks) == (14 if "low_rank" in name else 0)
    assert chain.num_promised(model.config) == len(ranks) or not ranks
