"""BitFit: a bias' gradient by hand, what is not kept for it, how many there are, and classes that hold none."""

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from transformers import (
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from models import adapters
from models.adapters import bitfit
from models.core.layers.linears import linears
from models.core.learning.counting import held_bytes

TOKEN_IDS = torch.arange(3, 43)[None]
SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


def loss(model: PreTrainedModel) -> Tensor:
    return model(TOKEN_IDS, labels=TOKEN_IDS, use_cache=False).loss


def inputs_held(model: PreTrainedModel) -> set[str]:
    """Names of linear layers of the blocks whose inputs autograd keeps."""
    inputs: dict[str, Tensor] = {}
    kept: set[int] = set()

    def catch(name: str) -> object:
        return lambda module, args: inputs.__setitem__(name, args[0].detach())  # alive, so no other takes its memory

    hooks = [layer.register_forward_pre_hook(catch(name)) for name, layer in linears(model)]

    def pack(tensor: Tensor) -> Tensor:
        kept.add(tensor.untyped_storage().data_ptr())
        return tensor.detach()

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        value = loss(model)
    for hook in hooks:
        hook.remove()
    held = {name for name, tensor in inputs.items() if tensor.untyped_storage().data_ptr() in kept}
    del value
    return held


def test_no_input_of_a_linear_layer_is_kept_for_a_weight_gradient(base: PreTrainedModel) -> None:
    assert inputs_held(base) == {name for name, _ in linears(base)}
    all_parameters = held_bytes(base, lambda: loss(base))
    adapters.attach(base, bitfit.Params(), torch.Generator())
    # Attention keeps its own output, which is what the output projection reads, for the gradient of the data.
    assert {name.rpartition(".")[2] for name in inputs_held(base)} <= {"o_proj"}
    assert held_bytes(base, lambda: loss(base)) < 0.85 * all_parameters


def test_the_gradient_of_a_bias_is_the_sum_of_its_outputs_gradients(base: PreTrainedModel) -> None:
    adapters.attach(base, bitfit.Params(), torch.Generator())
    layer, seen = base.model.layers[0].mlp.up_proj, []
    layer.register_full_backward_hook(lambda module, grad_in, grad_out: seen.append(grad_out[0]))
    loss(base).backward()
    assert torch.allclose(layer.bias.grad, seen[0].sum(dim=(0, 1)), rtol=1e-4, atol=1e-8)


def test_zero_biases_leave_the_model_its_base_and_the_config_names_them(base: PreTrainedModel) -> None:
    before = base(TOKEN_IDS).logits
    adapted = adapters.attach(base, bitfit.Params(), torch.Generator())
    assert torch.equal(base(TOKEN_IDS).logits, before)
    assert len(adapted.trained) == 2 * 7
    assert base.config.attention_bias and base.config.mlp_bias


def test_biases_of_the_default_target_are_a_tenth_of_a_percent(smollm2_shape: LlamaForCausalLM) -> None:
    base = smollm2_shape.num_parameters()
    bitfit.insert(smollm2_shape, bitfit.Params(), torch.Generator())
    trained = smollm2_shape.num_parameters(only_trainable=True)
    assert trained == 30 * (576 + 192 + 192 + 576 + 1536 + 1536 + 576)
    assert trained / base == pytest.approx(0.00116, abs=1e-5)


def test_a_class_that_has_some_biases_trains_those() -> None:
    model = Qwen2ForCausalLM(Qwen2Config(**SMALL))
    adapted = adapters.attach(model, bitfit.Params(), torch.Generator())
    wanted = {f"model.layers.0.self_attn.{name}_proj.bias" for name in "qkv"}
    assert adapted.trained.keys() == wanted
    adapters.merge(adapted)


def test_a_class_that_can_hold_no_bias_is_refused() -> None:
    model: nn.Module = MistralForCausalLM(MistralConfig(**SMALL))
    with pytest.raises(ValueError, match="no layer of MistralForCausalLM can have a bias"):
        adapters.attach(model, bitfit.Params(), torch.Generator())
