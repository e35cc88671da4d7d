"""Checkpointing changes what is held, not what is learnt."""

import pytest
import torch

from models.core.learning.counting import counted
from models.regimes import checkpointing
from tests.models.regimes.world import gradients, held, load, start


def test_gradients_are_equal_and_less_is_held_for_more_flops(tiny_target) -> None:
    model = load(tiny_target, num_layers=4)
    with counted(model) as plain:
        exact = gradients(model)
    regime = start(checkpointing, model)
    with counted(model) as checkpointed:
        again = gradients(model)
    regime.finish(model)
    for name, gradient in exact.items():
        assert torch.equal(gradient, again[name]), name
    # Four blocks' worth are held without, one block's with: the output matrix's part is the same.
    assert checkpointed.peak_activation_bytes < 0.5 * plain.peak_activation_bytes
    assert 1.15 < checkpointed.flops / plain.flops < 4 / 3  # the blocks' forward pass once more, not the output's


def test_every_second_block_holds_what_lies_between(tiny_target) -> None:
    peaks = []
    for every in (1, 2):
        model = load(tiny_target, num_layers=4)
        start(checkpointing, model, every=every)
        peaks.append(held(model))
    assert peaks[0] < peaks[1]


def test_blocks_learn_though_the_embedding_is_frozen(model) -> None:
    model.model.embed_tokens.requires_grad_(False)
    exact = gradients(model)
    start(checkpointing, model)
    again = gradients(model)
    assert exact.keys() == again.keys() and "model.layers.0.mlp.up_proj.weight" in exact
    assert all(torch.equal(gradient, again[name]) for name, gradient in exact.items())


def test_a_model_that_is_checkpointed_already_is_refused(model) -> None:
    start(checkpointing, model)
    with pytest.raises(ValueError, match="checkpointed already"):
        start(checkpointing, model)
