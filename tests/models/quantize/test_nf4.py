"""nf4: what is stored is what is computed with, at the paper's 4.127 bits a weight."""

import pytest
import torch
from transformers import PreTrainedModel

from models.core.layers import normal_float
from models.core.layers.normal_float import NormalFloats, Scales
from models.quantize import nf4

PREFIX = "model.layers.1.mlp.gate_proj."  # 256 × 128


def test_the_file_gives_the_weights_back_bit_by_bit(model: PreTrainedModel) -> None:
    quantized = nf4.quantize(model, [], nf4.Params())
    stored = {name.removeprefix(PREFIX): tensor for name, tensor in quantized.tensors.items() if PREFIX in name}
    scales = Scales(stored["scale"], stored["scale_blocks"], stored["scale_mean"])
    back = NormalFloats(normal_float.unpack(stored["weight_packed"]), scales).floats()
    assert torch.equal(back, quantized.model.model.layers[1].mlp.gate_proj.weight)


def test_a_weight_takes_the_papers_bits(model: PreTrainedModel) -> None:
    tensors = nf4.quantize(model, [], nf4.Params()).tensors
    bits = 8 * sum(tensor.nbytes for name, tensor in tensors.items() if PREFIX in name) / (256 * 128)
    assert bits == pytest.approx(4 + 8 / 64 + 32 / (64 * 256) + 32 / (256 * 128))
