"""Forms by hand: what a weight, a token and a layer become."""

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from models import quantize
from models.core.layers import normal_float
from models.core.layers.normal_float import NormalFloats, Scales
from models.quantize import fp8, int8_dynamic, int8_static, kv_cache, nf4, rtn
from tests.models.quantize.test_quantize_contract import DOCUMENTS

UP = "model.layers.1.mlp.up_proj."  # 256 × 128


def test_in_fp8_a_weight_takes_a_byte_and_keeps_its_first_bits(model: PreTrainedModel) -> None:
    weight = model.model.layers[1].mlp.up_proj.weight.detach().clone()
    tensors = fp8.quantize(model, [], fp8.Params()).tensors
    values, scales = tensors[UP + "weight"], tensors[UP + "weight_scale"]
    assert values.dtype == torch.float8_e4m3fn and scales.shape == (256, 1)
    # Half a step of 3 bits is a sixteenth, and half the least number below that.
    assert ((values.float() * scales - weight).abs() <= weight.abs() / 16 + scales * 2.0**-10).all()


def test_in_int8_a_layer_multiplies_integers(model: PreTrainedModel) -> None:
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


def test_a_layers_static_scale_is_the_largest_input_that_calibration_saw_and_shared_by_those_that_read_the_same(
    model: PreTrainedModel,
) -> None:
    caught: list[Tensor] = []
    model.model.layers[0].self_attn.q_proj.register_forward_pre_hook(lambda module, args: caught.append(args[0]))
    with torch.no_grad():
        for document in DOCUMENTS:
            model(torch.tensor([document]))
    most = max(float(inputs.abs().max()) for inputs in caught)
    tensors = int8_static.quantize(model, DOCUMENTS, int8_static.Params()).tensors
    scales = [tensors[f"model.layers.0.self_attn.{name}_proj.input_scale"].item() for name in "qkv"]
    assert scales == [pytest.approx(most / 127)] * 3


def test_a_percentile_clips(model: PreTrainedModel) -> None:
    whole, cut = (
        int8_static.quantize(copy.deepcopy(model), DOCUMENTS, int8_static.Params(**settings)).tensors
        for settings in ({}, {"percentile": 99})
    )
    name = "model.layers.0.mlp.down_proj.input_scale"
    assert cut[name] < 0.9 * whole[name]


def test_each_token_of_a_head_is_rounded_by_its_own_scale_and_fp8_clips_at_its_largest_number() -> None:
    states = torch.tensor([[[[127.0, 0.4], [1.27, 0.994]]]])
    assert torch.allclose(kv_cache._int8(states), torch.tensor([[[[127.0, 0.0], [1.27, 0.99]]]]), atol=1e-6)
    assert kv_cache._fp8(torch.tensor([1000.0, 17.0])).tolist() == [448.0, 16.0]


@pytest.mark.parametrize(("form", "width"), [("int8", 2 * (64 + 4)), ("fp8", 2 * 64)])
def test_a_token_of_the_cache_takes_its_bytes_in_every_layer(model: PreTrainedModel, form: str, width: int) -> None:
    quantized = kv_cache.quantize(model, [], kv_cache.Params(form=form))
    assert quantized.figures["kv_bytes_per_token"] == 2 * width  # 2 layers, 1 head of 64


def test_attention_stays_causal_and_reads_rounded_values(model: PreTrainedModel) -> None:
    ids = torch.arange(3, 23)[None]
    with torch.no_grad():
        exact = model(ids).logits
        quantized = kv_cache.quantize(model, [], kv_cache.Params(form="fp8"))
        rounded = quantized.model(ids).logits
        assert not torch.equal(rounded, exact) and (rounded - exact).norm() < 0.2 * exact.norm()
        assert torch.allclose(quantized.model(ids[:, :9]).logits, rounded[:, :9], atol=1e-4)


def test_an_nf4_file_gives_the_weights_back_bit_by_bit_at_the_papers_bits(model: PreTrainedModel) -> None:
    quantized = nf4.quantize(model, [], nf4.Params())
    stored = {name.removeprefix(UP): tensor for name, tensor in quantized.tensors.items() if UP in name}
    scales = Scales(stored["scale"], stored["scale_blocks"], stored["scale_mean"])
    back = NormalFloats(normal_float.unpack(stored["weight_packed"]), scales).floats()
    assert torch.equal(back, quantized.model.model.layers[1].mlp.up_proj.weight)
    bits = 8 * sum(tensor.nbytes for tensor in stored.values()) / (256 * 128)
    assert bits == pytest.approx(4 + 8 / 64 + 32 / (64 * 256) + 32 / (256 * 128))


def test_in_four_bits_a_weight_takes_half_a_byte_and_its_share_of_a_scale(model: PreTrainedModel) -> None:
    tensors = rtn.quantize(model, [], rtn.Params(group_size=32)).tensors
    assert tensors[UP + "weight_packed"].nbytes == 256 * 128 / 2
    assert tensors[UP + "weight_scale"].shape == (256, 4)
    assert tensors[UP + "weight_scale"].dtype == torch.bfloat16
    assert tensors[UP + "weight_shape"].tolist() == [256, 128]


def test_bits_that_no_engine_multiplies_are_simulated_and_not_saved(model: PreTrainedModel, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no engine reads this quantized form"):
        quantize.save(rtn.quantize(model, [], rtn.Params(bits=3)), tmp_path)
