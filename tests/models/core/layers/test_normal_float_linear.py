"""A linear layer in NormalFloat: the product of what the codes stand for, and nothing else kept."""

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from models.core.layers import normal_float
from models.core.layers.normal_float_linear import NormalFloatLinear
from models.core.layers.products import ProductRegime
from models.core.learning.counting import held_bytes


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


def test_a_training_regime_changes_its_product_too_until_it_is_over() -> None:
    class Doubled(ProductRegime):
        def multiply(self, inputs: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            assert not weight.requires_grad
            return 2 * inputs @ weight.T

    model = LlamaForCausalLM(LlamaConfig(vocab_size=8, hidden_size=64, intermediate_size=64, num_hidden_layers=1))
    model.requires_grad_(False)
    packed = NormalFloatLinear(model.model.layers[0].mlp.up_proj)
    model.model.layers[0].mlp.up_proj = packed
    regime, inputs = Doubled(None, torch.Generator()), torch.randn(3, 64)
    plain = packed(inputs)
    regime.start(model.train(), 1)
    assert torch.allclose(packed(inputs), 2 * plain, rtol=1e-5)
    assert torch.equal(packed.eval()(inputs), plain)
    regime.finish(model)
    assert torch.equal(packed.train()(inputs), plain)
