"""Adapters by hand: which weights they train, where they start, what they cost, and what they refuse."""

from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import MistralConfig, MistralForCausalLM, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from models import adapters
from models.adapters import bitfit, bottleneck, last_layers, lora, qlora
from models.core.layers import normal_float
from models.core.layers.linears import linears
from models.core.layers.lora import add_low_rank, take_out
from models.core.layers.normal_float import NormalFloatLinear
from tests.models.regimes.world import load

TOKEN_IDS = torch.arange(3, 43)[None]
SMALL = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
SMALL |= {"num_attention_heads": 2, "num_key_value_heads": 1}


def test_zero_biases_leave_the_model_its_base_and_the_config_names_them(model: PreTrainedModel) -> None:
    before = model(TOKEN_IDS).logits
    adapted = adapters.attach(model, bitfit.Params(), torch.Generator())
    assert torch.equal(model(TOKEN_IDS).logits, before)
    assert len(adapted.trained) == 2 * 7
    assert model.config.attention_bias and model.config.mlp_bias


def test_a_class_that_has_some_biases_trains_those() -> None:
    model = Qwen2ForCausalLM(Qwen2Config(**SMALL))
    adapted = adapters.attach(model, bitfit.Params(), torch.Generator())
    wanted = {f"model.layers.0.self_attn.{name}_proj.bias" for name in "qkv"}
    assert adapted.trained.keys() == wanted
    adapters.merge(adapted)


def test_a_class_that_can_hold_no_bias_is_refused() -> None:
    model = MistralForCausalLM(MistralConfig(**SMALL))
    with pytest.raises(ValueError, match="no layer of MistralForCausalLM can have a bias"):
        adapters.attach(model, bitfit.Params(), torch.Generator())


def test_a_bottleneck_by_hand() -> None:
    base = nn.Linear(2, 2, bias=False)
    base.weight.data = torch.eye(2)
    module = bottleneck.Bottleneck(base, 1, torch.Generator())
    module.down.weight.data, module.down.bias.data = torch.tensor([[1.0, 1.0]]), torch.tensor([-3.0])
    module.up.weight.data, module.up.bias.data = torch.tensor([[2.0], [-1.0]]), torch.tensor([0.0, 0.25])
    # D h + d = 1 + 3 − 3 = 1, and gelu(1) = Φ(1) = 0.8413.
    assert module(torch.tensor([1.0, 3.0])).tolist() == pytest.approx([1 + 2 * 0.8413, 3 - 0.8413 + 0.25], abs=1e-4)


def test_with_bottlenecks_the_model_starts_near_its_base_and_their_weights_are_cut_at_two_deviations(model) -> None:
    before = model(TOKEN_IDS).logits.detach()
    adapters.attach(model, bottleneck.Params(), torch.Generator().manual_seed(0))
    assert 0 < float((model(TOKEN_IDS).logits.detach() - before).norm() / before.norm()) < 0.01
    drawn = torch.cat(
        [m.down.weight.detach().flatten() for m in model.modules() if isinstance(m, bottleneck.Bottleneck)]
    )
    assert float(drawn.abs().max()) <= 0.02
    assert float(drawn.std()) == pytest.approx(0.0088, rel=0.05)  # a Gaussian cut at two deviations has 0.88 of its own


def test_bottlenecks_are_two_modules_and_two_norms_a_block(model: PreTrainedModel) -> None:
    bottleneck.insert(model.requires_grad_(False), bottleneck.Params(width=8), torch.Generator())
    assert model.num_parameters(only_trainable=True) == 2 * (2 * (2 * 8 * 128 + 8 + 128) + 2 * 128)


def test_a_block_of_other_names_is_refused(model: PreTrainedModel) -> None:
    model.model.layers[1].mlp.down_proj = nn.Identity()
    with pytest.raises(ValueError, match=r"model.layers.1 has no linear layer mlp.down_proj"):
        bottleneck.insert(model, bottleneck.Params(), torch.Generator())


def test_only_the_last_blocks_are_trained(model: PreTrainedModel) -> None:
    adapted = adapters.attach(model, last_layers.Params(num_layers=1), torch.Generator())
    block = sum(parameter.numel() for parameter in model.model.layers[1].parameters())
    assert all(name.startswith("model.layers.1.") for name in adapted.trained)
    assert adapted.trained_share == block / model.num_parameters()


def test_a_low_rank_layer_by_hand() -> None:
    model = nn.ModuleDict({"q_proj": nn.Linear(2, 2, bias=False)})
    model.q_proj.weight.data = torch.tensor([[1.0, 0.0], [0.0, 2.0]])
    add_low_rank(model, ["q_proj"], rank=1, alpha=3.0, rng=torch.Generator())
    model.q_proj.lora_A["default"].weight.data = torch.tensor([[1.0, -1.0]])
    model.q_proj.lora_B["default"].weight.data = torch.tensor([[2.0], [0.5]])
    # W x = (5, 4); A x = 3; B A x = (6, 1.5), times 3 / 1.
    wanted = [5 + 18, 4 + 4.5]
    assert model.q_proj(torch.tensor([5.0, 2.0])).tolist() == wanted
    take_out(model)
    assert type(model.q_proj) is nn.Linear
    assert model.q_proj(torch.tensor([5.0, 2.0])).tolist() == wanted


def test_by_default_the_model_starts_as_its_base_with_factors_on_query_and_value(model: PreTrainedModel) -> None:
    token_ids = torch.arange(3, 43)[None]
    before = model(token_ids).logits
    adapters.attach(model, lora.Params(), torch.Generator().manual_seed(0))
    assert torch.equal(model(token_ids).logits, before)
    # Query [128, 128] and value [64, 128] of two layers in rank 8.
    assert model.num_parameters(only_trainable=True) == 2 * 8 * (128 + 128 + 128 + 64)


@pytest.mark.parametrize(
    ("params", "fault"),
    [
        (lora.Params(layers=("q_proj", "query")), "layers must be of down_proj, .*; got query"),
        (lora.Params(rank=65, layers=("k_proj",)), "rank must be at most 64, the smaller side of .*k_proj; got 65"),
        (bottleneck.Params(width=128), "width must be less than the model's 128; got 128"),
        (last_layers.Params(num_layers=3), "num_layers must be at most 2, the model's; got 3"),
    ],
)
def test_settings_that_do_not_fit_are_refused_and_leave_the_model_plain(model, params, fault) -> None:
    with pytest.raises(ValueError, match=fault):
        adapters.attach(model, params, torch.Generator())
    adapters.attach(model, lora.Params(), torch.Generator())


def quantized(model: PreTrainedModel) -> PreTrainedModel:
    """The base with each weight rounded to NF4 by itself."""
    with torch.no_grad():
        for _, layer in linears(model):
            layer.weight.copy_(normal_float.encode(layer.weight).floats())
    return model


def test_the_base_takes_an_eighth_of_its_bytes(model: PreTrainedModel) -> None:
    num_weights = sum(layer.weight.numel() for _, layer in linears(model))
    rest = model.num_parameters() - num_weights
    adapted = adapters.attach(model, qlora.Params(), torch.Generator().manual_seed(0))
    frozen = sum(p.numel() * p.element_size() for p in model.parameters() if not p.requires_grad)
    packed = sum(module.num_bytes for module in model.modules() if isinstance(module, NormalFloatLinear))
    assert frozen == 4 * rest
    # The float32 maxima of layers of few blocks add a little to the 4.127 bits.
    assert 8 * packed / num_weights == pytest.approx(4.13, abs=0.01)
    assert adapted.num_base == num_weights + rest


def test_the_model_starts_as_the_quantized_base(tiny_target: Path) -> None:
    adapted = adapters.attach(load(tiny_target), qlora.Params(), torch.Generator().manual_seed(0))
    wanted = quantized(load(tiny_target))(TOKEN_IDS).logits
    assert torch.allclose(adapted.model(TOKEN_IDS).logits, wanted, atol=1e-5)


def test_layers_without_a_low_rank_part_are_quantized_too(tiny_target: Path) -> None:
    adapted = adapters.attach(load(tiny_target), qlora.Params(layers=("q_proj",)), torch.Generator().manual_seed(0))
    assert all(".q_proj.lora_" in name for name in adapted.trained)
    merged = adapters.merge(adapted)
    for (name, layer), (_, wanted) in zip(linears(merged), linears(quantized(load(tiny_target))), strict=True):
        assert torch.equal(layer.weight, wanted.weight), name
