"""What is kept for the backward pass, counted by hand."""

import torch
from torch import nn

from models.held import held_for_backward


def test_a_linear_layer_keeps_its_input_once_and_its_weight_is_not_counted() -> None:
    layer, inputs = nn.Linear(8, 4), torch.randn(3, 8)
    assert held_for_backward(layer, lambda: layer(inputs).sum()) == 4 * 3 * 8
    assert held_for_backward(layer, lambda: (layer(inputs) + layer(inputs)).sum()) == 4 * 3 * 8


def test_a_frozen_layer_keeps_nothing() -> None:
    layer, inputs = nn.Linear(8, 4).requires_grad_(False), torch.randn(3, 8, requires_grad=True)
    assert held_for_backward(layer, lambda: layer(inputs).sum()) == 0


def test_an_exponential_keeps_its_output() -> None:
    layer, inputs = nn.Linear(8, 4), torch.randn(3, 8)
    assert held_for_backward(layer, lambda: layer(inputs).exp().sum()) == 4 * (3 * 8 + 3 * 4)
