"""Gates skip blocks that cost more than they give."""

import pytest
import torch

from models.core.learning.counting import counted
from models.regimes import layer_skip_gate
from tests.models.regimes.world import load, train


def test_gates_start_at_the_probability_that_was_asked_for() -> None:
    gate = layer_skip_gate.Gate(8, start=0.7, speed=10, rng=torch.Generator().manual_seed(0))
    probability, memory = gate(torch.randn(3, 8), None)
    assert probability.tolist() == pytest.approx([0.7] * 3)
    assert memory[0].shape == (3, layer_skip_gate.WIDTH)


@pytest.mark.slow
def test_the_dearer_a_block_the_more_are_skipped_and_the_fewer_flops_run(tiny_target) -> None:
    shares, flops = [], []
    for cost_weight in (0.0, 10.0):
        model = load(tiny_target)
        with counted(model) as cost:
            trained = train(model, [layer_skip_gate.Params(cost_weight=cost_weight, start=0.8, speed=50)])
        shares.append(trained.figures["skipped_layer_share"])
        flops.append(cost.flops)
    assert shares[0] < 0.3 and shares[1] > shares[0] + 0.1
    assert flops[1] < flops[0]


def test_what_a_block_adds_is_scaled_by_the_probability_with_which_it_ran(tiny_target) -> None:
    settings = {"cost_weight": 0, "start": 0.5, "floor": 0.01, "speed": 1e-3}  # gates that hardly learn
    folded, left = load(tiny_target), load(tiny_target)
    train(folded, [layer_skip_gate.Params(**settings)], num_epochs=1)
    train(left, [layer_skip_gate.Params(**settings, fold=False)], num_epochs=1)
    for name, weight in left.state_dict().items():
        scale = 0.505 if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
        assert torch.allclose(scale * weight, folded.state_dict()[name], atol=2e-3), name
