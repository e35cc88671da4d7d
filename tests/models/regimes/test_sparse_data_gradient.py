"""2:4 output gradients: by hand, exactly two of four, the L1 norm, and which of the products they enter."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from models.layers.linears import linears
from models.regimes import Plan
from models.regimes.sparse_data_gradient import Params, keep_two_of_four, preserve_l1, regime


def normal(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def test_the_two_smaller_of_every_four_become_zero() -> None:
    gradient = torch.tensor([[1.0, -3.0, 2.0, 0.5, 0.0, 0.0, 0.0, 7.0]])
    assert keep_two_of_four(gradient).tolist() == [[0.0, -3.0, 2.0, 0.0, 0.0, 0.0, 0.0, 7.0]]


def test_exactly_two_of_four_are_kept_also_among_equals() -> None:
    for gradient in (normal(20, 5, 32, seed=0), torch.ones(3, 16)):
        kept = keep_two_of_four(gradient)
        assert (kept.unflatten(-1, (-1, 4)).count_nonzero(dim=-1) == 2).all()
        assert torch.equal(kept[kept != 0], gradient[kept != 0])


def test_the_l1_norm_of_each_group_is_preserved() -> None:
    gradient = torch.cat([normal(40, 16, seed=0, dtype=torch.float64), torch.zeros(1, 16)])
    kept = keep_two_of_four(gradient)
    scaled = preserve_l1(gradient, kept)
    groups, wanted = (values.unflatten(-1, (-1, 4)).abs().sum(-1) for values in (scaled, gradient))
    assert torch.allclose(groups, wanted, rtol=1e-15, atol=0)
    assert torch.equal(scaled.sign(), kept.sign())


def test_the_kept_two_are_scaled_alike() -> None:
    gradient = torch.tensor([[1.0, -3.0, 2.0, 2.0]])
    scaled = preserve_l1(gradient, torch.tensor([[0.0, -3.0, 2.0, 0.0]]))
    assert torch.allclose(scaled, torch.tensor([[0.0, -4.8, 3.2, 0.0]]))


@pytest.mark.parametrize("preserve", [False, True])
def test_only_the_data_gradient_is_sparse(preserve: bool) -> None:
    inputs, weight, gradient = normal(2, 5, 6, seed=0), normal(8, 6, seed=1), normal(2, 5, 8, seed=2)
    inputs.requires_grad_(True), weight.requires_grad_(True)
    made = regime(Params(preserve_l1=preserve), torch.Generator())
    output = made.multiply(inputs, weight)
    assert torch.equal(output, nn.functional.linear(inputs, weight))
    output.backward(gradient)
    sparse = keep_two_of_four(gradient)
    sparse = preserve_l1(gradient, sparse) if preserve else sparse
    assert torch.equal(inputs.grad, sparse @ weight)
    assert torch.allclose(weight.grad, torch.einsum("bto,bti->oi", gradient, inputs), atol=1e-5)
    assert made.figures()["kept_l1"] == pytest.approx(
        float(keep_two_of_four(gradient).abs().sum() / gradient.abs().sum())
    )


def test_a_gradient_that_is_sparse_already_gives_the_gradient_of_finite_differences() -> None:
    # gradcheck asks for the gradient of one output at a time, of which pruning takes nothing.
    made = regime(Params(preserve_l1=True), torch.Generator())
    inputs, weight = normal(2, 3, seed=0, dtype=torch.float64), normal(4, 3, seed=1, dtype=torch.float64)
    assert torch.autograd.gradcheck(made.multiply, (inputs.requires_grad_(True), weight.requires_grad_(True)))


def test_outputs_that_are_no_multiple_of_four_are_refused(tiny_target: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_target, dtype=torch.float32)
    model.model.layers[1].mlp.up_proj = nn.Linear(128, 254)
    with pytest.raises(ValueError, match=r"layer model.layers.1.mlp.up_proj has 254 outputs; .* a multiple of 4"):
        regime(Params(), torch.Generator()).start(model, Plan(1, 1))
    assert all(type(layer) is nn.Linear for _, layer in linears(model))
