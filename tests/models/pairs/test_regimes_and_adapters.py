"""Each training regime with each adapter: refused when the recipe is read, or the four laws hold after training."""

from itertools import product
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from models import adapters, catalog
from models.core.checkpoints.invariants import PreservedStructure
from models.core.checkpoints.loading import load_floats, save_model
from models.core.checkpoints.sparsity import Pattern
from models.core.learning.training import train_by_name
from models.prune import magnitude, prune_model
from models.recipe import parse_recipe
from models.regimes import Regime
from tests.models.pairs.forms import Form, chosen, forms, named, recipe_tables
from tests.models.pairs.laws import DOCUMENTS, TRAINING, logits, require_close, require_same, require_zeroes, zeroes

pytestmark = pytest.mark.slow

MERGED = [name for name in catalog.names("adapters") if hasattr(catalog.load("adapters", name), "fold")]
ADAPTERS, REGIMES = forms("adapters", *MERGED), forms("regimes")
WRITING = {"early_bird", "iterative_magnitude", "layer_skip_gate"}  # weights that an adapter leaves as they are


def is_refused(regime: Form, adapter: Form) -> bool:
    """Whether a pair is to be refused, by hand."""
    writes = regime.params.name in WRITING and getattr(regime.params, "fold", True)
    return writes or (regime.params.name, adapter.params.name) == ("predictive_sign_gradient", "bitfit")


def is_on_all(adapter: Form) -> bool:
    """Whether low-rank parts sit on every linear layer."""
    return adapter.params.name == "lora" and len(adapter.params.layers) == 7


PAIRS = list(product(REGIMES, ADAPTERS))
TRIED = chosen([pair for pair in PAIRS if not is_refused(*pair)], lambda pair: is_on_all(pair[1]))


def test_each_pair_is_refused_by_both_names_or_read() -> None:
    tables = recipe_tables()
    for regime, adapter in PAIRS:
        table = {"method": adapter.params.model_dump(), "regimes": [regime.params.model_dump()], "domain": "chat"}
        if not is_refused(regime, adapter):
            parse_recipe({**tables, "finetune": table}, "r")
            continue
        both = f'"{regime.params.name}" in \\[finetune\\] .* "{adapter.params.name}" in \\[finetune\\]; choose'
        with pytest.raises(ValueError, match=both):
            parse_recipe({**tables, "finetune": table}, "r")


class Hooked(Regime):
    """What the model says, as it is plain and as it computes in training, when all other hooks are still in it."""

    def finish(self, model: PreTrainedModel) -> None:
        self.plain = logits(model)
        self.weights = state(model, trained=True)


@pytest.mark.parametrize(("regime", "adapter"), TRIED, ids=[named(pair) for pair in TRIED])
def test_the_laws_hold(regime: Form, adapter: Form, pair_target: Path, tmp_path: Path) -> None:
    model = load_floats(pair_target)
    prune_model(model, [], magnitude.Params(), Pattern(kept=2, group=4))
    held, zero = PreservedStructure(model), zeroes(model)
    adapted = adapters.attach(model, adapter.params, torch.Generator().manual_seed(0))
    frozen = state(model, trained=False)
    began, hooked = state(model, trained=True), Hooked()
    train_by_name(model, DOCUMENTS, TRAINING, [regime.params], seed=3, more=[hooked])

    ended, trained = state(model, trained=True), logits(model)
    assert not all(torch.equal(one, began[name]) for name, one in ended.items())
    require_same(state(model, trained=False), frozen)
    if all(torch.equal(one, hooked.weights[name]) for name, one in ended.items()):  # which it has not rounded
        require_close(trained, hooked.plain)
    merged = adapters.merge(adapted)
    require_close(logits(merged), trained)
    held.put_back(merged)
    require_zeroes(merged, zero)
    save_model(merged, tmp_path, pair_target)
    again = load_floats(tmp_path)
    require_same(again.state_dict(), {name: one.float() for name, one in merged.state_dict().items()})
    require_zeroes(again, zero)


def state(model: PreTrainedModel, trained: bool) -> dict[str, Tensor]:
    """Return what is trained, or all else that a model holds: parameters, and the packed weights of a 4-bit base."""
    learnt = {name for name, one in model.named_parameters() if one.requires_grad}
    found = {name: one.clone() for name, one in model.state_dict().items() if (name in learnt) == trained}
    return {name.replace(".block.", "."): one for name, one in found.items()}  # within a partial block
