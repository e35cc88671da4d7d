"""Stochastic layer-wise shuffle: a layer reads its tokens in a random order, the deeper the more often.

A scan, such as a state-space layer's, reads image tokens in an order that the image does not have. In training layer l
of L (from 1) shuffles with probability P · l / L all tokens that it reads, and puts back in order what it says, so that
deep layers learn to need the order less. It costs nothing in use, where nothing is shuffled.

It is for encoders whose layers scan. A transformer's layer knows order by the positions and the mask that it is given:
shuffled along with the tokens they change nothing, and left as they are a causal mask would show a token the ones that
it is to predict. So it is no regime of `models.regimes`, which train language models, but a library.

Letters: B images, T tokens, H width, L layers.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

PAPER = "arXiv:2408.17081, section 3"

Layer = Callable[[Tensor], Tensor]  # [B, T, H] → [B, T, H]


def probabilities(num_layers: int, most: float) -> list[float]:
    """Return with which probability each layer shuffles, the last one with P; ValueError if that is no probability."""
    if not 0 <= most <= 1:
        raise ValueError(f"most must be from 0 to 1, got {most}")
    return [most * number / num_layers for number in range(1, num_layers + 1)]


def shuffled(layer: Layer, states: Tensor, order: Tensor) -> Tensor:
    """Let a layer, its residual included, read tokens of [B, T, H] in another order, and put back what it says;
    ValueError if the order is not a permutation of T tokens."""
    if sorted(order.tolist()) != list(range(states.shape[1])):
        raise ValueError(f"order must hold each of {states.shape[1]} places once, got {len(order)} numbers")
    return layer(states[:, order])[:, order.argsort()]


def forward(layers: Sequence[Layer], states: Tensor, most: float, rng: torch.Generator | None) -> Tensor:
    """Run all layers on [B, T, H], each in its coin's order; ValueError if P is no probability. Coins and orders are
    drawn, one of each a layer for the whole batch; without `rng` nothing is shuffled, as in use."""
    for layer, probability in zip(layers, probabilities(len(layers), most), strict=True):
        if rng is not None and float(torch.rand((), generator=rng)) < probability:
            states = shuffled(layer, states, torch.randperm(states.shape[1], generator=rng))
        else:
            states = layer(states)
    return states
