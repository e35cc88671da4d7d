"""QLoRA: what the base weighs, where it starts, and what comes out of a merge."""

from collections.abc import Callable

import pytest
import torch
from transformers import PreTrainedModel

from models import adapters
from models.adapters import qlora
from models.core.layers import normal_float
from models.core.layers.linears import linears
from models.core.layers.normal_float import NormalFloatLinear

TOKEN_IDS = torch.arange(3, 43)[None]


def quantized(model: PreTrainedModel) -> PreTrainedModel:
    """The base with each weight rounded to NF4 by itself."""
    with torch.no_grad():
        for _, layer in linears(model):
            layer.weight.copy_(normal_float.encode(layer.weight).floats())
    return model


def test_the_base_takes_an_eighth_of_its_bytes(base: PreTrainedModel) -> None:
    num_weights = sum(layer.weight.numel() for _, layer in linears(base))
    rest = base.num_parameters() - num_weights
    adapted = adapters.attach(base, qlora.Params(), torch.Generator().manual_seed(0))
    frozen = sum(p.numel() * p.element_size() for p in base.parameters() if not p.requires_grad)
    packed = sum(module.num_bytes for module in base.modules() if isinstance(module, NormalFloatLinear))
    assert frozen == 4 * rest
    # The float32 maxima of layers of few blocks add a little to the 4.127 bits.
    assert 8 * packed / num_weights == pytest.approx(4.13, abs=0.01)
    assert adapted.num_base == num_weights + rest


def test_the_model_starts_as_the_quantized_base(make_base: Callable[[], PreTrainedModel]) -> None:
    adapted = adapters.attach(make_base(), qlora.Params(), torch.Generator().manual_seed(0))
    wanted = quantized(make_base())(TOKEN_IDS).logits
    assert torch.allclose(adapted.model(TOKEN_IDS).logits, wanted, atol=1e-5)


def test_layers_without_a_low_rank_part_are_quantized_too(make_base: Callable[[], PreTrainedModel]) -> None:
    base = make_base()
    adapted = adapters.attach(base, qlora.Params(layers=("q_proj",)), torch.Generator().manual_seed(0))
    assert all(".q_proj.lora_" in name for name in adapted.trained)
    merged = adapters.merge(adapted)
    for (name, layer), (_, wanted) in zip(linears(merged), linears(quantized(make_base())), strict=True):
        assert torch.equal(layer.weight, wanted.weight), name


def test_gradients_reach_the_first_layer_through_a_quantized_base(base: PreTrainedModel) -> None:
    adapted = adapters.attach(base, qlora.Params(rank=4), torch.Generator().manual_seed(0))
    base(TOKEN_IDS, labels=TOKEN_IDS).loss.backward()
    # A's gradient is B times something, and B starts at zero.
    assert all((p.grad.norm() > 0) == ("lora_B" in name) for name, p in adapted.trained.items())
