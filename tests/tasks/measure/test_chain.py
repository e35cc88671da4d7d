"""What tables of comparisons compare can be built: the served forms are recipes, and their stages run."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from models import catalog
from models.core.checkpoints.invariants import require
from models.core.checkpoints.loading import load_floats
from tasks.measure import chain
from tasks.measure.comparisons import Bench, Row, regimes, select
from tasks.measure.comparisons import all as forms
from tasks.stages.change_target import Changed, Start
from tests.tasks.made import recipe_of
from tests.tasks.measure.benches import random_texts

pytestmark = pytest.mark.slow

TEXT = {"source": {"name": "synthetic", "count": 60}, "num_train": 30, "num_held_out": 10}
HALF = {"pattern": "2:4", "num_documents": 8, "max_length": 48}
LORA = {"method": {"name": "lora"}, "domain": "chat"}
UNREAD = re.compile(r'\[(?P<table>\w+)\]: key "(?P<key>\w+)" would do nothing')


def bench(target: Path, work_dir: Path) -> Bench:
    texts = random_texts(8, 48, ("chat", "code"))
    return Bench(target, texts, texts, 0.1, work_dir)


def recipe(tables: dict[str, Any]) -> None:
    """Parse a recipe with these tables, but for keys that rows of a comparison share and one's method does not read."""
    read = {name: dict(table) for name, table in tables.items()}
    while True:
        try:
            recipe_of(text={"chat": TEXT, "code": TEXT}, **read)
        except ValueError as error:
            if (unread := UNREAD.search(str(error))) is None:
                raise
            del read[unread["table"]][unread["key"]]
        else:
            return


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
        "finetune": {**LORA, "max_length": 48, "batch_tokens": 192},
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
    tables = {"prune": {**HALF, "method": {"name": "magnitude"}}, "finetune": LORA}
    with pytest.raises(ValueError, match=r"promised of layer model\.layers\.0\.mlp\.down_proj is not noted any more"):
        chain.make(bench(tiny_target, tmp_path), tables, seed=0)
