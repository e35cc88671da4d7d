"""int8_dynamic: what a layer says by hand."""

import torch
from transformers import PreTrainedModel

from models.quantize import int8_dynamic


def test_a_layer_multiplies_integers(model: PreTrainedModel) -> None:
    weight = model.model.layers[0].mlp.down_proj.weight.detach().clone()
    quantized = int8_dynamic.quantize(model, [], int8_dynamic.Params())
    inputs = torch.randn(3, weight.shape[1], generator=torch.Generator().manual_seed(0))
    row_scale, token_scale = weight.abs().amax(1) / 127, inputs.abs().amax(1) / 127
    integers = [(inputs / token_scale[:, None]).round().long(), (weight / row_scale[:, None]).round().long()]
    expected = (integers[0] @ integers[1].T) * token_scale[:, None] * row_scale
    assert torch.allclose(quantized.model.model.layers[0].mlp.down_proj(inputs), expected, rtol=1e-5, atol=1e-6)


def test_seven_bits_stay_below_64(model: PreTrainedModel) -> None:
    quantized = int8_dynamic.quantize(model, [], int8_dynamic.Params(weight_bits=7))
    values = [tensor for tensor in quantized.tensors.values() if tensor.dtype == torch.int8]
    assert len(values) == 14 and max(int(tensor.abs().max()) for tensor in values) == 63
