"""Each group learns from its own loss alone, and only one group is held."""

import copy

import torch

from models.regimes import blockwise_local
from tests.models.regimes.world import batch, gradients, held, load, start, train


def test_a_groups_gradient_is_that_of_its_own_loss(model) -> None:
    inputs = batch()
    first = copy.deepcopy(model)
    first.config.num_hidden_layers = 1  # block 0, the norm and the output matrix
    local, whole = gradients(first), gradients(model)
    start(blockwise_local, model, num_groups=2)
    learnt = gradients(model)
    assert inputs["input_ids"].shape[0] > 1
    for name in learnt:
        if "layers.0" in name:
            assert torch.allclose(learnt[name], local[name], rtol=1e-4, atol=1e-7), name
            assert not torch.allclose(learnt[name], whole[name], rtol=1e-2), name
        if "layers.1" in name:
            assert torch.allclose(learnt[name], whole[name], rtol=1e-4, atol=1e-7), name


def test_less_is_held_than_end_to_end(tiny_target) -> None:
    model = load(tiny_target, num_layers=4)
    plain = held(model)
    start(blockwise_local, model)
    assert held(model) < 0.45 * plain


def test_in_evaluation_it_changes_nothing(tiny_target) -> None:
    model = load(tiny_target).eval()
    plain = model(**batch()).logits
    start(blockwise_local, model)
    assert torch.equal(model(**batch()).logits, plain)


def test_a_group_of_frozen_blocks_trains_its_norm_alone(tiny_target) -> None:
    model = load(tiny_target).requires_grad_(False)
    model.model.layers[1].requires_grad_(True)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    train(model, [blockwise_local.Params()], num_epochs=1)
    moved = {name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])}
    assert moved and all(name.startswith("model.layers.1.") for name in moved)
