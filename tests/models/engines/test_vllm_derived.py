"""What vLLM computed of a draft's weights is renewed after a swap, and a stale one is told; without an engine.

vLLM's objects stand here as far as they are read.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from models.engines.vllm.redraft_vllm.swap import GAINS, STATE, WorkerDraft, derive, derived_errors

H, WIDTH, NUM_LAYERS = 4, 3, 2


def parallel(weights: dict[str, Tensor]) -> Any:
    """Return a proposer of P-EAGLE whose modules have some weights, and whose state is older."""
    product = nn.Linear(3 * H, H, bias=False)
    product.weight = nn.Parameter(weights["fc.weight"])
    model = SimpleNamespace(combine_hidden_states=product, mask_hidden=weights["mask_hidden"])
    return SimpleNamespace(model=model, **{STATE: torch.zeros(H)})


def dflash(weights: dict[str, Tensor]) -> Any:
    """Return a proposer of DFlash whose modules have some weights, and whose stacked gains are older."""
    inner = SimpleNamespace(layers=range(NUM_LAYERS), **{GAINS: torch.ones(NUM_LAYERS, WIDTH)})

    def build() -> None:
        setattr(inner, GAINS, torch.stack([weights[name] for name in sorted(weights)]))

    inner._build_fused_kv_buffers = build
    return SimpleNamespace(model=SimpleNamespace(model=inner), **{STATE: None})


MADE = [
    (parallel, {"fc.weight": (H, 3 * H), "mask_hidden": (1, 3 * H)}, STATE),
    (dflash, {f"layers.{number}.self_attn.k_norm.weight": (WIDTH,) for number in range(NUM_LAYERS)}, GAINS),
]


@pytest.mark.parametrize(("make", "shapes", "name"), MADE)
def test_what_is_stale_is_told_and_renewed(make: Any, shapes: dict[str, tuple[int, ...]], name: str) -> None:
    rng = torch.Generator().manual_seed(0)
    weights = {key: torch.randn(shape, generator=rng) for key, shape in shapes.items()}
    drafter = make(weights)
    holder = drafter if name == STATE else drafter.model.model
    captured = getattr(holder, name)  # by a CUDA graph
    assert derived_errors(drafter, weights)[name] > 0.5
    derive(drafter)
    assert getattr(holder, name) is captured
    assert derived_errors(drafter, weights)[name] < 1e-5


def test_a_proposer_that_keeps_nothing_has_no_errors() -> None:
    drafter = SimpleNamespace(model=nn.Linear(2, 2))
    derive(drafter)
    assert derived_errors(drafter, {}) == {}


@pytest.mark.parametrize("name", ["drafter", "speculator"])
def test_what_proposes_is_found_in_both_of_vllms_model_runners(name: str) -> None:
    weights = {"fc.weight": torch.ones(H, 3 * H), "mask_hidden": torch.ones(1, 3 * H)}
    worker = SimpleNamespace(model_runner=SimpleNamespace(**{name: parallel(weights)}))
    assert WorkerDraft(worker).derived_errors(weights).keys() == {STATE}
