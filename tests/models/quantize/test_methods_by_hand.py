"""Methods by hand that choose what to round to: `awq`, `gptq`, `llm_int8`, `bitnet` and `qat`."""

import copy

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from models.core.layers import integers
from models.core.layers.linears import Gram
from models.quantize import awq, bitnet, gptq, llm_int8, qat, rtn
from tests.models.quantize.test_quantize_contract import DOCUMENTS


@pytest.fixture
def lively(model: PreTrainedModel) -> PreTrainedModel:
    """A model in which a few features carry most."""
    with torch.no_grad():
        for block in model.model.layers:
            block.input_layernorm.weight[:6] = block.post_attention_layernorm.weight[:6] = 25.0
    return model


def logits(model: PreTrainedModel) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor(DOCUMENTS)).logits


def test_awqs_scales_are_folded_so_that_only_rounding_is_left(lively) -> None:
    before = logits(lively)
    norm = lively.model.layers[0].input_layernorm.weight.clone()
    quantized = awq.quantize(lively, DOCUMENTS, awq.Params(bits=8, group_size=32, clip=False))
    assert not torch.allclose(lively.model.layers[0].input_layernorm.weight, norm, rtol=0.05)
    after = logits(quantized.model)
    assert (after - before).norm() < 0.08 * before.norm()


def test_by_awq_features_that_carry_much_lose_less_than_to_rounding_to_nearest(lively) -> None:
    before = logits(lively)
    nearest = rtn.quantize(copy.deepcopy(lively), [], rtn.Params(group_size=128, symmetric=False))
    aware = awq.quantize(lively, DOCUMENTS, awq.Params(group_size=128))
    lost = [(logits(found.model) - before).norm() for found in (aware, nearest)]
    assert lost[0] < 0.85 * lost[1]


def test_awq_names_a_layer_of_another_layout(model: PreTrainedModel) -> None:
    model.model.layers[0].mlp.side_proj = torch.nn.Linear(128, 128)
    with pytest.raises(ValueError, match=r"layer model\.layers\.0\.mlp\.side_proj is not of Llama's layout"):
        awq.quantize(model, DOCUMENTS, awq.Params())


def test_ternary_values_by_hand() -> None:
    values, scale = bitnet.few_valued(torch.tensor([[0.3, -0.2, 1.5, -2.0]]), bitnet.Params())
    assert scale.item() == 1.0
    assert values.tolist() == [[0, 0, 1, -1]]


def test_binary_values_are_signs_about_the_mean() -> None:
    values, scale = bitnet.few_valued(torch.tensor([[1.0, 2.0, 3.0, -2.0]]), bitnet.Params(weights="binary"))
    assert scale.item() == 2.0  # mean magnitude; the mean is 1, which counts as above
    assert values.tolist() == [[1, 1, 1, -1]]


def digits(words: torch.Tensor, base: int, each: int) -> torch.Tensor:
    """Take apart what is packed, in which the first digit counts most."""
    return (words.long()[:, None] // base ** torch.arange(each - 1, -1, -1) % base).flatten()


@pytest.mark.parametrize("count", [1, 5, 17, 240])
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


@pytest.mark.parametrize("weights", ["ternary", "binary"])
def test_bitnets_stored_layer_is_the_trained_one(weights: str) -> None:
    torch.manual_seed(0)
    layer, params = nn.Linear(48, 16), bitnet.Params(weights=weights)
    inputs = torch.randn(2, 7, 48)
    trained, stored = bitnet.Hooks(params).forward(layer, inputs), bitnet._Linear(layer, params)(inputs)
    assert torch.allclose(trained, stored, atol=1e-5)


def test_bitnets_gradients_pass_both_roundings() -> None:
    torch.manual_seed(0)
    layer, params = nn.Linear(8, 4, bias=False), bitnet.Params(norm=False)
    inputs = torch.randn(3, 8, requires_grad=True)
    bitnet.Hooks(params).forward(layer, inputs).sum().backward()
    values, scale = bitnet.few_valued(layer.weight.detach(), params)
    scales = inputs.detach().abs().amax(1, keepdim=True) / 127
    rounded = (inputs.detach() / scales).round() * scales
    assert torch.allclose(inputs.grad, (values * scale).sum(0).expand(3, 8), atol=1e-6)
    assert torch.allclose(layer.weight.grad, rounded.sum(0).expand(4, 8), atol=1e-5)


def correlated(width: int = 256, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(seed)
    weight = torch.randn(24, width, generator=rng)
    # Correlated features, without which there is nothing to make up for.
    mixing = torch.randn(32, width, generator=rng)
    return weight, torch.randn(400, 32, generator=rng) @ mixing + 0.3 * torch.randn(400, width, generator=rng)


def error(weight: torch.Tensor, inputs: torch.Tensor, rounded: torch.Tensor) -> float:
    return float(((weight - rounded) @ inputs.T).norm())


def test_by_gptq_the_second_column_makes_up_for_the_first() -> None:
    # Two equal features: what the first weight loses to rounding the second gains, up to the damping.
    weight = torch.zeros(1, 32)
    weight[0, :3] = torch.tensor([0.4, 0.0, 7.0])  # the scale is 1
    inputs = torch.zeros(200, 32)
    inputs[:, 0] = inputs[:, 1] = torch.randn(200, generator=torch.Generator().manual_seed(0))
    inputs[:, 2] = torch.randn(200, generator=torch.Generator().manual_seed(1))
    weight[0, 1] = 0.2
    found = gptq.solve(weight, Gram(inputs), gptq.Params(group_size=32, damping=1e-4))
    assert found.values[0, :3].tolist() == [0, 1, 7]  # to nearest it would be 0, 0, 7


def test_by_gptq_features_that_do_not_correlate_are_rounded_to_nearest() -> None:
    weight, _ = correlated(128)
    inputs = torch.eye(128) * torch.rand(128, generator=torch.Generator().manual_seed(1)).add(0.5)
    found = gptq.solve(weight, Gram(inputs), gptq.Params(group_size=64))
    nearest = integers.quantize(weight, 4, 64, True, torch.bfloat16)
    assert torch.equal(found.values, nearest.values) and torch.equal(found.scales, nearest.scales)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("act_order", [True, False])
def test_gptqs_outputs_are_nearer_than_with_rounding_to_nearest(symmetric: bool, act_order: bool) -> None:
    weight, inputs = correlated()
    found = gptq.solve(weight, Gram(inputs), gptq.Params(group_size=64, symmetric=symmetric, act_order=act_order))
    nearest = integers.quantize(weight, 4, 64, symmetric, torch.bfloat16)
    assert error(weight, inputs, found.floats()) < 0.7 * error(weight, inputs, nearest.floats())


def test_gptq_refuses_inputs_of_another_width() -> None:
    with pytest.raises(ValueError, match="inputs have width 64, the layer takes 128"):
        gptq.solve(torch.zeros(4, 128), Gram(torch.zeros(9, 64)), gptq.Params())


def linear(width: int = 8) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(width, 4, bias=False)


def test_a_feature_that_reaches_the_threshold_is_multiplied_in_16_bits() -> None:
    plain = linear()
    mixed = llm_int8._Linear(plain, torch.tensor([2]), llm_int8.Params())
    inputs = torch.zeros(2, 8)
    inputs[0, 2] = 50.0
    expected = 50 * plain.weight[:, 2].half().float()
    assert torch.equal(mixed(inputs)[0], expected)
    assert mixed.values[:, 2].eq(0).all() and torch.equal(mixed.kept[:, 0], plain.weight[:, 2].half())


def test_an_outlier_that_calibration_did_not_see_is_read_back_from_integers() -> None:
    plain = linear()
    mixed = llm_int8._Linear(plain, torch.tensor([2]), llm_int8.Params())
    inputs = torch.zeros(1, 8)
    inputs[0, 5] = 6.0
    back = (mixed.values[:, 5] * mixed.scale[:, 0]).half().float()
    assert torch.equal(mixed(inputs)[0], 6 * back)


def test_zero_points_use_the_whole_range() -> None:
    codes = llm_int8._encode(torch.tensor([[0.0, 1.0, 2.54]]), "zeropoint", by_row=True)
    assert codes.values.tolist() == [[-127, -27, 127]] and codes.zero.item() == -127
    assert torch.allclose(codes.floats(), torch.tensor([[0.0, 1.0, 2.54]]), atol=1e-6)


def test_products_with_zero_points_are_those_of_the_floats_that_they_stand_for() -> None:
    rng = torch.Generator().manual_seed(0)
    inputs = llm_int8._encode(torch.rand(5, 300, generator=rng), "zeropoint", by_row=True)
    weight = llm_int8._encode(torch.rand(7, 300, generator=rng) - 0.2, "zeropoint", by_row=True)
    exact = inputs.floats().double() @ weight.floats().double().T
    assert torch.allclose(llm_int8._multiply(inputs, weight).double(), exact, rtol=1e-5)


def test_outlier_features_of_the_calibration_text_are_found_and_counted(model) -> None:
    with torch.no_grad():
        for block in model.model.layers:
            block.input_layernorm.weight[7] = 60.0
    quantized = llm_int8.quantize(model, DOCUMENTS, llm_int8.Params())
    columns = quantized.tensors["model.layers.1.self_attn.q_proj.outlier_columns"]
    assert columns.tolist() == [7]
    assert quantized.tensors["model.layers.1.self_attn.q_proj.outlier_weight"].shape == (128, 1)
    assert quantized.figures["outlier_features"] >= 6 / 128 / 14


def test_without_decomposition_nothing_is_calibrated(model: PreTrainedModel) -> None:
    quantized = llm_int8.quantize(model, [], llm_int8.Params(decompose=False))
    assert quantized.figures["outlier_features"] == 0
    assert not any("outlier" in name for name in quantized.tensors)


def test_qats_gradients_are_those_of_the_rounded_weights_product(model: PreTrainedModel) -> None:
    layer = model.model.layers[0].mlp.up_proj
    params = qat.Params(bits=2, group_size=32)
    regime = qat.Hooks(params, torch.Generator())
    regime.start(model, None)
    inputs = torch.randn(5, 128, generator=torch.Generator().manual_seed(0), requires_grad=True)
    layer(inputs).square().sum().backward()
    rounded = params.round(layer.weight.detach()).floats()
    outputs = inputs.detach() @ rounded.T
    assert torch.allclose(inputs.grad, 2 * outputs @ rounded, rtol=1e-4, atol=1e-5)
    assert torch.allclose(layer.weight.grad, 2 * outputs.T @ inputs.detach(), rtol=1e-4, atol=1e-5)
    regime.finish(model)
    assert torch.equal(layer(inputs), inputs @ layer.weight.T)
