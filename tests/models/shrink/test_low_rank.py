"""Low rank: the error is the dropped singular values, and less than that of an SVD that sees no inputs."""

import pytest
import torch
from transformers import PreTrainedModel

from models.core.layers.linears import Gram, linears
from models.core.layers.reshape import take_layers
from models.params import TrainingParams
from models.shrink import low_rank, num_parameters

TRAINING = TrainingParams()


def layer(outputs: int, inputs: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A layer, and 300 inputs of unequal directions."""
    rng = torch.Generator().manual_seed(0)
    mixed = torch.randn(inputs, inputs, generator=rng) * torch.logspace(-1.5, 0.5, inputs)
    return torch.randn(outputs, inputs, generator=rng), torch.randn(300, inputs, generator=rng) @ mixed


@pytest.mark.parametrize(("outputs", "inputs"), [(24, 40), (40, 24), (32, 32)])
def test_the_error_is_the_dropped_singular_values_of_the_output(outputs: int, inputs: int) -> None:
    weight, x = layer(outputs, inputs)
    made = low_rank.truncate(weight, Gram(x), 8)
    assert torch.linalg.matrix_rank(made, rtol=1e-4) == 8
    error = float((x @ (made - weight).T).square().sum())
    dropped = torch.linalg.svdvals((x @ weight.T).double())[8:].square().sum()
    assert error == pytest.approx(float(dropped), rel=1e-3)
    left, values, right = torch.linalg.svd(weight)
    blind = left[:, :8] * values[:8] @ right[:8]
    assert error < 0.9 * float((x @ (blind - weight).T).square().sum())


def test_the_paper_s_way_by_a_cholesky_factor_gives_the_same_weights() -> None:
    weight, x = (tensor.double() for tensor in layer(24, 40))
    factor = torch.linalg.cholesky(x.T @ x)
    left, values, right = torch.linalg.svd(weight @ factor)
    wanted = (left[:, :8] * values[:8] @ right[:8]) @ torch.linalg.inv(factor)
    torch.testing.assert_close(low_rank.truncate(weight, Gram(x), 8), wanted, rtol=1e-3, atol=1e-3)


def test_inputs_that_span_less_than_the_rank_leave_the_output_as_it_is() -> None:
    weight, x = layer(40, 24)
    x[:, 5:] = 0
    made = low_rank.truncate(weight, Gram(x), 8)
    torch.testing.assert_close(x @ made.T, x @ weight.T, rtol=1e-3, atol=1e-3)


def test_ranks_are_noted_and_counted_as_factors(model: PreTrainedModel) -> None:
    texts = torch.randint(3, 259, (8, 32), generator=torch.Generator().manual_seed(0)).tolist()
    less = low_rank.shrink(model, texts, low_rank.Params(share=0.5), TRAINING)
    ranks = less.config.redraft["ranks"]
    assert ranks["model.layers.0.self_attn.q_proj"] == 32  # [128, 128]: 32 · 256 is half of 128²
    assert ranks["model.layers.1.mlp.down_proj"] == 42  # [128, 256]: 42.7 · 384
    for name, each in linears(less):
        assert torch.linalg.matrix_rank(each.weight, rtol=1e-4) == ranks[name]
    factors = sum(ranks[name] * sum(each.weight.shape) for name, each in linears(model))
    dense = sum(each.weight.numel() for _, each in linears(model))
    assert num_parameters(less) == num_parameters(model) - dense + factors
    one = take_layers(less, [1])
    assert num_parameters(one) == sum(parameter.numel() for parameter in one.parameters())


def test_too_little_calibration_and_too_small_a_share_are_refused(model: PreTrainedModel) -> None:
    with pytest.raises(ValueError, match="calibration has 10 tokens; rank 42 takes at least as many"):
        low_rank.shrink(model, [list(range(3, 13))], low_rank.Params(share=0.5), TRAINING)
    with pytest.raises(
        ValueError, match=r"layer model\.layers\.0\.self_attn\.q_proj is \[128, 128\]; factors of rank 1"
    ):
        low_rank.shrink(model, [list(range(3, 13))], low_rank.Params(share=0.01), TRAINING)
