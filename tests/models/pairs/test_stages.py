"""Each method of a stage before each of a later one: refused when the recipe is read, or the laws hold afterwards."""

from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PretrainedConfig, PreTrainedModel

from models import adapters, catalog
from models.core.checkpoints.invariants import noted, require
from models.core.checkpoints.loading import load_floats, load_model
from models.recipe import parse_recipe
from models.stages import TABLES
from tasks.measure import chain
from tasks.stages.change_target import Start, store
from tests.models.pairs.forms import Form, chosen, forms, named, recipe_tables
from tests.models.pairs.laws import DOCUMENTS, TRAINING, require_same, require_zeroes, zeroes

pytestmark = pytest.mark.slow

SETTINGS = TRAINING.model_dump()
STAGES: dict[str, list[Form]] = {
    "pretrain": forms("regimes"),
    "shrink": forms("shrink", *(one for one in catalog.names("shrink") if catalog.load("shrink", one).KEEPS_TOKENS)),
    "prune": forms("prune"),
    "finetune": forms(
        "adapters", *(one for one in catalog.names("adapters") if hasattr(catalog.load("adapters", one), "fold"))
    ),
    "quantize": forms("quantize", *(one for one in catalog.names("quantize") if catalog.load("quantize", one).STORED)),
}
ORDER = list(STAGES)
STAGE_OF = {form.family: stage for stage, of in STAGES.items() for form in of}
MAKES_ZEROES = ("iterative_magnitude", "early_bird")
CUT = ("iterative_magnitude", "early_bird-1")  # forms of them that find a ticket, whose shape is cut in any case


def table(form: Form) -> dict[str, Any]:
    """Return a stage's table with one method, and what that reads of the stage's keys."""
    method, stage = form.params.model_dump(mode="json"), STAGE_OF[form.family]
    module = catalog.load(form.family, form.params.name)
    if stage == "pretrain":
        return {**SETTINGS, "regimes": [method]}
    trains = stage == "finetune" or hasattr(module, "Hooks") or form.params.name == "sheared"
    read: dict[str, Any] = SETTINGS if trains else {}
    if stage == "shrink" and getattr(form.params, "keep", "") != "spread":
        read = {**read, "max_length": TRAINING.max_length}
    if getattr(module, "CALIBRATED", False):
        read = {**read, "num_documents": 8, "max_length": TRAINING.max_length}
    needs = {"prune": {"pattern": "2:4"}, "finetune": {"domain": "chat"}}
    return {**read, **needs.get(stage, {}), "method": method}


def is_refused(first: Form, second: Form) -> bool:
    """Whether a pair is to be refused, by hand: zeroes that a low rank fills, a rank that zeroes and rounding raise."""
    if second.params.name == "low_rank":
        return first.params.name in MAKES_ZEROES
    return first.params.name == "low_rank" and STAGE_OF[second.family] in ("prune", "quantize")


def is_always_tried(pair: tuple[Form, Form]) -> bool:
    """Whether the first makes zeroes or a rank, and the second gives low-rank parts to every layer or cuts a shape."""
    first, second = pair
    if second.family == "shrink":
        return first.name in CUT
    promises = first.params.name in ("low_rank", *MAKES_ZEROES, *catalog.names("prune"))
    return promises and len(getattr(second.params, "layers", None) or ()) == 7


def has_layers(first: Form, second: Form) -> bool:
    """Whether the first leaves as many layers as the second asks for; the stage says so where it does not."""
    return not (getattr(first.params, "num_layers", None) == 1 and second.params.name == "last_layers") or (
        second.params.num_layers == 1
    )


PAIRS = [
    (first, second)
    for earlier, later in combinations(ORDER, 2)
    for first in STAGES[earlier]
    for second in STAGES[later]
]
TRIED = chosen([pair for pair in PAIRS if not is_refused(*pair) and has_layers(*pair)], is_always_tried)


def test_each_pair_is_refused_by_both_names_or_read() -> None:
    tables = recipe_tables()
    for first, second in PAIRS:
        pair = {STAGE_OF[form.family]: table(form) for form in (first, second)}
        if not is_refused(first, second):
            parse_recipe({**tables, **pair}, "r")
            continue
        later, earlier = (f'"{one.params.name}" in \\[{STAGE_OF[one.family]}\\]' for one in (second, first))
        with pytest.raises(ValueError, match=f"{later} (fills|raises) .* of {earlier}; choose one of the two"):
            parse_recipe({**tables, **pair}, "r")


Run = Callable[[Path, Form], Path]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Return what runs a stage on a target and returns the directory of what it stored; each is run once."""
    found: dict[tuple[Path, Form], Path] = {}

    def run_once(target: Path, form: Form) -> Path:
        if (target, form) not in found:
            stage, made, work = STAGE_OF[form.family], *(tmp_path_factory.mktemp(name) for name in ("made", "work"))
            settings = TABLES[stage].model_validate(table(form))
            start = Start(load_model(target), {"chat": DOCUMENTS}, work, lambda progress: None)
            store(chain.CHANGES[stage](settings, 1, start), made, target)
            found[target, form] = made
        return found[target, form]

    return run_once


@pytest.mark.parametrize(("first", "second"), TRIED, ids=[named(pair) for pair in TRIED])
def test_the_laws_hold(first: Form, second: Form, pair_target: Path, run: Run) -> None:
    before_dir = run(pair_target, first)
    made = run(before_dir, second)
    before, after = load_floats(before_dir), load_floats(made)

    with torch.no_grad():  # the saved shape loads again, as an engine's and to be changed
        assert torch.isfinite(load_model(made)(torch.tensor(DOCUMENTS[:1]), use_cache=False).logits).all()
    require(after)
    promised = noted(before.config).patterns
    assert bool(promised) == makes_zeroes(first)
    if shape(before.config) == shape(after.config):
        require_zeroes(after, {name: zero & (name in promised) for name, zero in zeroes(before).items()})
        assert promised.keys() <= noted(after.config).patterns.keys()
    elif promised:
        assert noted(after.config).patterns
    if STAGE_OF[second.family] == "finetune" and not getattr(before.config, "redraft", {}).get(
        "factors"
    ):  # split and rounded anew
        require_same(after.state_dict(), untouched(before, second))


def makes_zeroes(form: Form) -> bool:
    """Whether there are zeroes to be kept: two epochs are too few for the default ticket, of which five masks agree."""
    finds = form.params.name != "early_bird" or form.params.window == 1
    return finds and (form.params.name in MAKES_ZEROES or STAGE_OF[form.family] == "prune")


def shape(config: PretrainedConfig) -> tuple[int, ...]:
    return config.num_hidden_layers, config.hidden_size, config.intermediate_size, config.num_attention_heads


def untouched(model: PreTrainedModel, adapter: Form) -> dict[str, torch.Tensor]:
    """Return the weights that an adapter neither trains, nor stores in fewer bits, nor puts a low-rank part beside."""
    plain = {name: one.detach().clone() for name, one in model.named_parameters()}
    adapters.attach(model, adapter.params, torch.Generator().manual_seed(0))
    frozen = {name for name, one in model.named_parameters() if not one.requires_grad}
    return {name: one for name, one in plain.items() if name in frozen}
