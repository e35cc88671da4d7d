"""int8_static: scales come from calibration, block by block, and are shared by layers that read the same."""

import copy

import pytest
import torch
from transformers import PreTrainedModel

from models.quantize import int8_static


def test_a_layers_scale_is_the_largest_input_that_calibration_saw(
    model: PreTrainedModel, documents: list[list[int]]
) -> None:
    caught = []
    model.model.layers[0].self_attn.q_proj.register_forward_pre_hook(lambda module, args: caught.append(args[0]))
    with torch.no_grad():
        for document in documents:
            model(torch.tensor([document]))
    most = max(float(inputs.abs().max()) for inputs in caught)
    tensors = int8_static.quantize(model, documents, int8_static.Params()).tensors
    scales = [tensors[f"model.layers.0.self_attn.{name}_proj.input_scale"].item() for name in "qkv"]
    assert scales == [pytest.approx(most / 127)] * 3


def test_a_percentile_clips(model: PreTrainedModel, documents: list[list[int]]) -> None:
    other = copy.deepcopy(model)
    whole = int8_static.quantize(model, documents, int8_static.Params()).tensors
    cut = int8_static.quantize(other, documents, int8_static.Params(percentile=99)).tensors
    name = "model.layers.0.mlp.down_proj.input_scale"
    assert cut[name] < 0.9 * whole[name]
