"""GPTQ: a column by hand, the grid that it shares with rounding to nearest, and errors below it."""

import pytest
import torch

from models.core.layers import integers
from models.core.layers.linears import Gram
from models.quantize.gptq import Params, solve


def layer(width: int = 256, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(seed)
    weight = torch.randn(24, width, generator=rng)
    # Correlated features, without which there is nothing to make up for.
    mixing = torch.randn(32, width, generator=rng)
    return weight, torch.randn(400, 32, generator=rng) @ mixing + 0.3 * torch.randn(400, width, generator=rng)


def error(weight: torch.Tensor, inputs: torch.Tensor, rounded: torch.Tensor) -> float:
    return float(((weight - rounded) @ inputs.T).norm())


def test_the_second_column_makes_up_for_the_first() -> None:
    # Two equal features: what the first weight loses to rounding the second gains, up to the damping.
    weight = torch.zeros(1, 32)
    weight[0, :3] = torch.tensor([0.4, 0.0, 7.0])  # the scale is 1
    inputs = torch.zeros(200, 32)
    inputs[:, 0] = inputs[:, 1] = torch.randn(200, generator=torch.Generator().manual_seed(0))
    inputs[:, 2] = torch.randn(200, generator=torch.Generator().manual_seed(1))
    weight[0, 1] = 0.2
    found = solve(weight, Gram(inputs), Params(group_size=32, damping=1e-4))
    assert found.values[0, :3].tolist() == [0, 1, 7]  # to nearest it would be 0, 0, 7


def test_features_that_do_not_correlate_are_rounded_to_nearest() -> None:
    weight, _ = layer(128)
    inputs = torch.eye(128) * torch.rand(128, generator=torch.Generator().manual_seed(1)).add(0.5)
    found = solve(weight, Gram(inputs), Params(group_size=64))
    nearest = integers.quantize(weight, 4, 64, True, torch.bfloat16)
    assert torch.equal(found.values, nearest.values) and torch.equal(found.scales, nearest.scales)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("act_order", [True, False])
def test_outputs_are_nearer_than_with_rounding_to_nearest(symmetric: bool, act_order: bool) -> None:
    weight, inputs = layer()
    found = solve(weight, Gram(inputs), Params(group_size=64, symmetric=symmetric, act_order=act_order))
    nearest = integers.quantize(weight, 4, 64, symmetric, torch.bfloat16)
    assert error(weight, inputs, found.floats()) < 0.7 * error(weight, inputs, nearest.floats())


def test_a_feature_that_was_never_seen_is_rounded_to_nearest() -> None:
    weight, inputs = layer(128)
    inputs[:, 5] = 0
    found = solve(weight, Gram(inputs), Params(group_size=128))
    assert found.floats()[:, 5] == pytest.approx(weight[:, 5], abs=float(found.scales.max()) / 2 + 1e-3)


def test_inputs_of_another_width_are_refused() -> None:
    with pytest.raises(ValueError, match="inputs have width 64, the layer takes 128"):
        solve(torch.zeros(4, 128), Gram(torch.zeros(9, 64)), Params())
