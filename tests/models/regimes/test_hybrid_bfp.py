from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from models.core.layers.linears import linears
from models.core.layers.numbers import block_floating_point
from models.core.learning.training import train
from models.params import TrainingParams
from models.regimes.hybrid_bfp import Hooks, Params
from tests.models.regimes.world import load
from tests.models.rounding import P_VALUE, copies, mean_p_value, normal

DOCUMENTS = [[3 + (start + 3 * place) % 60 for place in range(16)] for start in range(8)]


def tensors() -> tuple[Tensor, Tensor, Tensor]:
    """Inputs [2, 15, 40], weight [30, 40] and output gradient [2, 15, 30]."""
    return normal(2, 15, 40, seed=0), normal(30, 40, seed=1), normal(2, 15, 30, seed=2)


def test_all_three_products_take_rounded_operands() -> None:
    inputs, weight, gradient = tensors()
    made = Hooks(Params(mantissa_bits=4), torch.Generator())
    output = made.multiply(inputs.requires_grad_(True), weight.requires_grad_(True))
    output.backward(gradient)
    x, w, g = (
        block_floating_point(values.detach().flatten(0, -2), 4, 24)[0].view_as(values)
        for values in (inputs, weight, gradient)
    )
    assert torch.equal(output, functional.linear(x, w))
    assert torch.equal(inputs.grad, g @ w)
    assert torch.allclose(weight.grad, g.flatten(0, 1).T @ x.flatten(0, 1), atol=1e-5)
    assert made.figures()["flushed_share"] == pytest.approx(float((g == 0).float().mean()))


def test_training_with_wide_mantissas_is_training_in_floats(tiny_target: Path) -> None:
    params = TrainingParams(batch_tokens=64, num_epochs=2)
    plain = train(load(tiny_target), DOCUMENTS, params).losses
    wide, narrow = (
        train(load(tiny_target), DOCUMENTS, params, [Hooks(Params(mantissa_bits=m, wide_bits=23), torch.Generator())])
        for m in (20, 3)
    )
    gap = [max(abs(a - b) for (_, a), (_, b) in zip(plain, one.losses, strict=True)) for one in (wide, narrow)]
    assert gap[0] < 1e-3 < gap[1]


def test_weights_are_kept_with_the_wide_mantissa_from_the_start(model: PreTrainedModel) -> None:
    before, attention = model.model.layers[0].mlp.up_proj.weight.detach().clone(), model.config._attn_implementation
    made = Hooks(Params(mantissa_bits=3, wide_bits=6), torch.Generator())
    made.start(model, 1)
    for found, wanted in ((model.lm_head, model.lm_head.weight), (model.model.layers[0].mlp.up_proj, before)):
        assert torch.equal(found.weight, block_floating_point(wanted.detach(), 6, 24)[0])
    made.finish(model)
    assert type(model.lm_head) is torch.nn.Linear and model.config._attn_implementation == attention
    train(model, DOCUMENTS, TrainingParams(batch_tokens=64), [made])
    for _, layer in linears(model):
        assert torch.equal(layer.weight, block_floating_point(layer.weight.detach(), 6, 24)[0])
        assert not torch.equal(layer.weight, block_floating_point(layer.weight.detach(), 3, 24)[0])


def test_stochastic_rounding_of_the_gradient_has_no_bias() -> None:
    weight, gradient = torch.eye(4), normal(2, 4, seed=0)
    made = Hooks(Params(mantissa_bits=3, tile=2, stochastic=True), torch.Generator().manual_seed(0))
    inputs = torch.zeros(10_000, 2, 4, requires_grad=True)
    made.multiply(inputs, weight).backward(copies(gradient))
    assert mean_p_value(inputs.grad, gradient) > P_VALUE


def test_products_of_attention_take_rounded_operands_matrix_by_matrix() -> None:
    query, key, gradient = normal(2, 3, 30, 16, seed=0), normal(2, 3, 30, 16, seed=1), normal(2, 3, 30, 30, seed=2)
    made = Hooks(Params(mantissa_bits=4), torch.Generator())
    scores = made.multiply_pairs(query.requires_grad_(True), key.requires_grad_(True))
    scores.backward(gradient)
    for number in range(2):
        for head in range(3):
            q, k, g = (block_floating_point(one[number, head].detach(), 4, 24)[0] for one in (query, key, gradient))
            assert torch.allclose(scores[number, head], q @ k.T, atol=1e-5)
            assert torch.allclose(query.grad[number, head], g @ k, atol=1e-5)
            assert torch.allclose(key.grad[number, head], g.T @ q, atol=1e-5)


def test_attention_and_output_matrix_multiply_blocks_while_training_and_where_asked(tiny_target: Path) -> None:
    model, plain = load(tiny_target), load(tiny_target)
    token_ids = torch.tensor(DOCUMENTS)
    for module in (model, plain):
        for _, layer in linears(module):
            layer.weight.data.zero_()  # but for attention's values: what is left is the average of earlier states
    made = Hooks(Params(mantissa_bits=2, wide_bits=23), torch.Generator())
    with torch.no_grad(), made.answering(model):
        few = model(token_ids).logits
    assert torch.equal(model(token_ids).logits, plain(token_ids).logits)
    states = model.model(token_ids).last_hidden_state.detach()
    assert torch.allclose(few, made.multiply(states, model.lm_head.weight), atol=1e-4)
    weights = torch.rand(1, 1, 16, 16, generator=torch.Generator().manual_seed(0)).softmax(-1)
    assert not torch.allclose(made.multiply_pairs(weights, weights), weights @ weights.mT, atol=1e-4)


def test_a_frozen_weight_is_not_kept_in_blocks(model: PreTrainedModel) -> None:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("up_proj" in name)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    train(model, DOCUMENTS, TrainingParams(), [Hooks(Params(mantissa_bits=2, wide_bits=4), torch.Generator())])
    moved = {name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])}
    assert moved == {name for name in before if "up_proj" in name}
