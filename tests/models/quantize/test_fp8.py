"""fp8: a weight is a byte, and rounding keeps three bits of it."""

import torch
from transformers import PreTrainedModel

from models.quantize import fp8


def test_a_weight_takes_a_byte_and_keeps_its_first_bits(model: PreTrainedModel) -> None:
    layer = model.model.layers[1].mlp.up_proj
    weight = layer.weight.detach().clone()
    tensors = fp8.quantize(model, [], fp8.Params()).tensors
    values = tensors["model.layers.1.mlp.up_proj.weight"]
    scales = tensors["model.layers.1.mlp.up_proj.weight_scale"]
    assert values.dtype == torch.float8_e4m3fn and scales.shape == (256, 1)
    # Half a step of 3 bits is a sixteenth, and half the least number below that.
    assert ((values.float() * scales - weight).abs() <= weight.abs() / 16 + scales * 2.0**-10).all()
