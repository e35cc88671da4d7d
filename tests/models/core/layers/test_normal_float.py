import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from models.core.layers import normal_float
from models.core.layers.normal_float import NormalFloatLinear, Scales
from models.core.layers.products import ProductRegime
from models.core.learning.counting import held_bytes

# arXiv:2305.14314, appendix E.
PUBLISHED = [
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
]  # fmt: skip


def weights() -> torch.Tensor:
    return torch.randn(64, 256, generator=torch.Generator().manual_seed(0))


def test_the_levels_are_the_published_ones() -> None:
    assert torch.allclose(normal_float.levels(), torch.tensor(PUBLISHED), atol=2e-7, rtol=0)


def test_a_block_by_hand() -> None:
    block = torch.tensor([[2.0, -2.0, 0.0, 0.9]])
    found = normal_float.encode(block, block_size=4, double=False)
    assert found.codes.tolist() == [[15, 0, 7, 12]]  # 0.45 lies nearest to 0.4407
    assert found.floats().tolist() == [[2.0, -2.0, 0.0, pytest.approx(2 * 0.44070983)]]
    codes = normal_float.encode(weights()).codes
    assert torch.equal(normal_float.unpack(normal_float.pack(codes)), codes)


def test_levels_come_back_as_they_are_zeros_stay_zero_and_blocks_must_fill_a_row() -> None:
    weight = weights()
    weight[3] = 0
    assert not normal_float.encode(weight).floats()[3].any()
    once = normal_float.encode(weight, double=False).floats()
    assert torch.equal(normal_float.encode(once, double=False).floats(), once)
    with pytest.raises(ValueError, match="block_size 64 does not divide a width of 100"):
        normal_float.encode(torch.zeros(2, 100))


def test_scales_lose_less_than_their_8_bits_say() -> None:
    exact = normal_float.encode(weights(), double=False).scales
    found = normal_float.encode(weights(), double=True).scales
    assert isinstance(found, Scales) and isinstance(exact, torch.Tensor)
    assert (found.floats() - exact).abs().max() <= (exact - exact.mean()).abs().max() / 16
    assert found.values.nbytes + found.blocks.nbytes + found.mean.nbytes == 256 + 4 + 4


def test_a_product_is_that_of_the_dequantized_weight_and_keeps_no_copy_of_it() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(128, 64).requires_grad_(False)
    packed = NormalFloatLinear(layer)
    inputs = torch.randn(2, 5, 128, requires_grad=True)
    outputs = packed(inputs)
    outputs.square().sum().backward()
    same = inputs.detach().clone().requires_grad_(True)
    wanted = nn.functional.linear(same, normal_float.encode(layer.weight).floats(), layer.bias)
    wanted.square().sum().backward()
    assert torch.allclose(outputs, wanted) and torch.allclose(inputs.grad, same.grad)
    assert held_bytes(packed, lambda: packed(inputs).sum()) == 0


def test_a_weight_takes_half_a_byte_and_its_share_of_the_scales() -> None:
    packed = NormalFloatLinear(nn.Linear(1024, 1024, bias=False))
    assert packed.num_bytes == 1024**2 // 2 + 1024 * 16 + 4 * 64 + 4


def test_a_training_regime_changes_its_product_too_until_it_is_over(model: PreTrainedModel) -> None:
    class Doubled(ProductRegime):
        def multiply(self, inputs: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            assert not weight.requires_grad
            return 2 * inputs @ weight.T

    mlp = model.requires_grad_(False).model.layers[0].mlp
    mlp.up_proj = packed = NormalFloatLinear(mlp.up_proj)
    regime, inputs = Doubled(None, torch.Generator()), torch.randn(3, 128)
    plain = packed(inputs)
    regime.start(model.train(), 1)
    assert torch.allclose(packed(inputs), 2 * plain, rtol=1e-5)
    assert torch.equal(packed.eval()(inputs), plain)
    regime.finish(model)
    assert torch.equal(packed.train()(inputs), plain)
