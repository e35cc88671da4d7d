"""LLM.int8(): outliers found and kept, integers with zero points exact, one byte a weight."""

import torch
from torch import nn
from transformers import PreTrainedModel

from models.quantize import llm_int8
from models.quantize.llm_int8 import Params, _encode, _Linear, _multiply


def layer(width: int = 8) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(width, 4, bias=False)


def test_a_feature_that_reaches_the_threshold_is_multiplied_in_16_bits() -> None:
    plain = layer()
    mixed = _Linear(plain, torch.tensor([2]), Params())
    inputs = torch.zeros(2, 8)
    inputs[0, 2] = 50.0
    expected = 50 * plain.weight[:, 2].half().float()
    assert torch.equal(mixed(inputs)[0], expected)
    assert mixed.values[:, 2].eq(0).all() and torch.equal(mixed.kept[:, 0], plain.weight[:, 2].half())


def test_an_outlier_that_calibration_did_not_see_is_read_back_from_integers() -> None:
    plain = layer()
    mixed = _Linear(plain, torch.tensor([2]), Params())
    inputs = torch.zeros(1, 8)
    inputs[0, 5] = 6.0
    back = (mixed.values[:, 5] * mixed.scale[:, 0]).half().float()
    assert torch.equal(mixed(inputs)[0], 6 * back)


def test_zero_points_use_the_whole_range() -> None:
    codes = _encode(torch.tensor([[0.0, 1.0, 2.54]]), "zeropoint", by_row=True)
    assert codes.values.tolist() == [[-127, -27, 127]] and codes.zero.item() == -127
    assert torch.allclose(codes.floats(), torch.tensor([[0.0, 1.0, 2.54]]), atol=1e-6)


def test_products_with_zero_points_are_those_of_the_floats_that_they_stand_for() -> None:
    rng = torch.Generator().manual_seed(0)
    inputs = _encode(torch.rand(5, 300, generator=rng), "zeropoint", by_row=True)
    weight = _encode(torch.rand(7, 300, generator=rng) - 0.2, "zeropoint", by_row=True)
    exact = inputs.floats().double() @ weight.floats().double().T
    assert torch.allclose(_multiply(inputs, weight).double(), exact, rtol=1e-5)


def test_outliers_of_the_calibration_text_are_found_and_counted(
    model: PreTrainedModel, documents: list[list[int]]
) -> None:
    with torch.no_grad():
        for block in model.model.layers:
            block.input_layernorm.weight[7] = 60.0
    quantized = llm_int8.quantize(model, documents, Params())
    columns = quantized.tensors["model.layers.1.self_attn.q_proj.outlier_columns"]
    assert columns.tolist() == [7]
    assert quantized.tensors["model.layers.1.self_attn.q_proj.outlier_weight"].shape == (128, 1)
    assert quantized.figures["outlier_features"] >= 6 / 128 / 14


def test_without_decomposition_nothing_is_calibrated(model: PreTrainedModel) -> None:
    quantized = llm_int8.quantize(model, [], Params(decompose=False))
    assert quantized.figures["outlier_features"] == 0
    assert not any("outlier" in name for name in quantized.tensors)
