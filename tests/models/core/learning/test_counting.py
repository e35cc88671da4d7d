import gc
import weakref

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from models.core.learning.counting import Cost, counted, held_bytes

# The tiny target: hidden size, key and value width, MLP width, vocabulary, layers, heads, width of a head.
H, KV, INNER, V, L, HEADS, D = 128, 64, 256, 259, 2, 2, 64
B, T = 3, 10
N = B * T


def stepped(model: PreTrainedModel) -> tuple[Cost, int]:
    """Count a forward and a backward pass, and the FLOPs of the former alone."""
    token_ids = torch.zeros(B, T, dtype=torch.int64)
    with counted(model) as cost:
        loss = model(input_ids=token_ids, labels=token_ids, use_cache=False).loss
        forward_flops = cost.flops
        loss.backward()
    return cost, forward_flops


def test_flops_of_the_two_layer_model_are_those_counted_by_hand(model: PreTrainedModel) -> None:
    products = 2 * N * (L * (2 * H * H + 2 * H * KV + 3 * H * INNER) + H * V)
    attention = L * 2 * (2 * B * HEADS * T * T * D)
    cost, forward_flops = stepped(model)
    assert forward_flops == products + attention
    assert cost.flops - forward_flops == 2 * products + 2.5 * attention  # the scores are computed once more


def test_memory_held_by_the_two_layer_model_is_that_counted_by_hand(model: PreTrainedModel) -> None:
    norm = 3 * H + 1  # what comes in, what is scaled, what goes out, and the scale
    attention = H + 2 * KV + HEADS + H  # queries, keys and values, the scores' normaliser, the output
    mlp = 4 * INNER  # gate, its activation, up, their product
    floats = N * (L * (2 * norm + attention + mlp) + norm + V) + 2 * T * D + 1  # and rotations, and the loss's divisor
    token_ids_and_labels = 2 * 8 * N
    assert stepped(model)[0].peak_activation_bytes == 4 * floats + token_ids_and_labels


@pytest.mark.slow
def test_a_model_goes_once_nobody_else_holds_it_though_what_it_put_out_was_saved() -> None:
    def count() -> weakref.ref[Tensor]:
        layers = nn.Sequential(nn.Linear(4, 4), nn.Sigmoid())  # whose backward pass wants what it put out
        assert held_bytes(layers, lambda: layers(torch.ones(2, 4))) > 0
        return weakref.ref(layers[0].weight)

    gone = count()
    gc.collect()
    assert gone() is None


def test_a_storage_is_counted_once_and_leaves_with_its_graph() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    with counted(model) as cost:
        for _ in range(3):
            model(torch.ones(5, 4)).sum().backward()
    # What goes in, and the ReLU's output, which the ReLU and the next layer both save.
    assert cost.peak_activation_bytes == 4 * (5 * 4 + 5 * 8)
    # Two products forward; backward two for weights and one for the hidden layer.
    assert cost.flops == 3 * 2 * 5 * (2 * (4 * 8 + 8 * 2) + 8 * 2)
    with counted(layer := nn.Linear(4, 2)) as cost:  # two graphs that are alive at once add up
        sum(layer(torch.ones(5, 4)).sum() for _ in range(2)).backward()
    assert cost.peak_activation_bytes == 2 * 4 * 5 * 4


def test_a_linear_layer_holds_its_input_and_a_frozen_one_nothing() -> None:
    layer, inputs = nn.Linear(8, 4), torch.randn(3, 8, requires_grad=True)
    assert held_bytes(layer, lambda: layer(inputs).sum()) == 4 * 3 * 8
    assert held_bytes(layer.requires_grad_(False), lambda: layer(inputs).sum()) == 0
