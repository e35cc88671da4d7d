"""BitNet: values by hand, packing that comes back, gradients straight through, learning from scratch."""

import pytest
import torch
from torch import nn

from models.quantize import bitnet
from models.quantize.bitnet import Params


def test_ternary_values_by_hand() -> None:
    values, scale = bitnet.few_valued(torch.tensor([[0.3, -0.2, 1.5, -2.0]]), Params())
    assert scale.item() == 1.0
    assert values.tolist() == [[0, 0, 1, -1]]


def test_binary_values_are_signs_about_the_mean() -> None:
    values, scale = bitnet.few_valued(torch.tensor([[1.0, 2.0, 3.0, -2.0]]), Params(weights="binary"))
    assert scale.item() == 2.0  # mean magnitude; the mean is 1, which counts as above
    assert values.tolist() == [[1, 1, 1, -1]]


def digits(words: torch.Tensor, base: int, each: int) -> torch.Tensor:
    """Take apart what is packed, in which the first digit counts most."""
    return (words.long()[:, None] // base ** torch.arange(each - 1, -1, -1) % base).flatten()


@pytest.mark.parametrize("count", [1, 4, 5, 6, 8, 17, 240])
def test_packed_values_come_back(count: int) -> None:
    rng = torch.Generator().manual_seed(count)
    ternary = torch.randint(-1, 2, (2, count), generator=rng).to(torch.int8)
    words = bitnet.pack(ternary, "ternary")
    assert words.dtype == torch.uint8 and len(words) == -(-2 * count // 5)
    assert torch.equal(digits(words, 3, 5)[: 2 * count] - 1, ternary.flatten())
    binary = 2 * torch.randint(0, 2, (2, count), generator=rng).to(torch.int8) - 1
    words = bitnet.pack(binary, "binary")
    assert len(words) == -(-2 * count // 8)
    assert torch.equal(2 * digits(words, 2, 8)[: 2 * count] - 1, binary.flatten())


def test_all_243_bytes_of_five_ternary_weights_are_different() -> None:
    every = torch.cartesian_prod(*[torch.tensor([-1, 0, 1])] * 5)
    assert bitnet.pack(every, "ternary").tolist() == list(range(243))


@pytest.mark.parametrize("weights", ["ternary", "binary"])
def test_the_stored_layer_is_the_trained_one(weights: str) -> None:
    torch.manual_seed(0)
    layer, params = nn.Linear(48, 16), Params(weights=weights)
    inputs = torch.randn(2, 7, 48)
    trained, stored = bitnet.Hooks(params).forward(layer, inputs), bitnet._Linear(layer, params)(inputs)
    assert torch.allclose(trained, stored, atol=1e-5)


def test_gradients_pass_both_roundings() -> None:
    torch.manual_seed(0)
    layer, params = nn.Linear(8, 4, bias=False), Params(norm=False)
    inputs = torch.randn(3, 8, requires_grad=True)
    bitnet.Hooks(params).forward(layer, inputs).sum().backward()
    values, scale = bitnet.few_valued(layer.weight.detach(), params)
    scales = inputs.detach().abs().amax(1, keepdim=True) / 127
    rounded = (inputs.detach() / scales).round() * scales
    assert torch.allclose(inputs.grad, (values * scale).sum(0).expand(3, 8), atol=1e-6)
    assert torch.allclose(layer.weight.grad, rounded.sum(0).expand(4, 8), atol=1e-5)
