"""Dovetail: the draft on a small GPU, the target on the CPU, and only tokens between them.

A GPU that can't hold the target holds a draft. So each machine reads its own weights, and what crosses is K tokens and
their states. Rows of the target are not free on a CPU, so fewer tokens are drafted than on a GPU alone; passes of the
draft are nearly free, so it may have more layers. With T(r) the target's pass of r rows and D draft layers, each of the
target's width, a step of K drafted tokens takes

    T(1 + K) + K · d(D),    d(D) = (D · layer + rest) on the CPU, / F + x on a GPU F times as fast at x ms a crossing

and says (1 − α^(K+1)) / (1 − α) tokens. T, layer and rest are measured here. F, x and what deeper drafts have accepted,
α(D) = 1 − 0.35 · D^(−1/4), are assumed and not measured: they stand for a GPU of 360 GB/s beside a CPU of 40, and for
heads of one to eight layers.
"""

import math
from typing import NamedTuple

import torch

from models.systems import Given, Seen, Times

PAPER = "arXiv:2412.18934, sections 3 and 4"
CLAIM = "1.79× to 10.1× faster than what such devices do otherwise, with fewer drafted tokens and a deeper draft"
GAIN = "ms a token, the target alone on the CPU / draft on the GPU"
KEPT = "outputs (nothing is put out)"
SHAPE = "faster than target alone and than both on the CPU, with a draft as deep or deeper than is best there"
NEEDS = "a GPU beside the CPU"
FASTER, CROSSING_MS = 9.0, 0.05
DEPTHS, MOST_DRAFTED = (1, 2, 3, 4, 5, 6, 8), 16


class Choice(NamedTuple):
    """The best way to draft in one place.

    Attributes:
        token_ms: that an emitted token takes.
        num_drafted: K; 0 where speculation doesn't pay.
        depth: layers of the draft.
    """

    token_ms: float
    num_drafted: int
    depth: int


def acceptance(depth: int) -> float:
    """Return α of a draft of so many layers, as assumed; see the module."""
    return float(1 - 0.35 * depth**-0.25)


def best(times: Times, num_layers: int, faster: float, crossing_ms: float) -> Choice:
    """Return the fastest way to draft.

    Args:
        times: of the target, on the CPU.
        num_layers: of the target, to tell what one layer takes.
        faster: how many times as fast the draft's place is as the CPU; 1 for the CPU itself.
        crossing_ms: for a token there and back; 0 for the CPU itself.

    Raises:
        ValueError: passes were never measured, or a place has no speed.
    """
    line = times.cost.line(1)
    if line is None:
        raise ValueError("wanted times of passes of the target, got none")
    if not (faster > 0 and crossing_ms >= 0):
        raise ValueError(f"faster must be above 0 and crossing_ms from 0, got {faster} and {crossing_ms}")
    layer_ms = (times.attention_ms[1] + times.mlp_ms[1]) / num_layers
    choices = [Choice(line.target_ms(1), 0, 0)]
    for depth in DEPTHS:
        pass_ms = (depth * layer_ms + times.rest_ms) / faster + crossing_ms
        alpha = acceptance(depth)
        for number in range(1, MOST_DRAFTED + 1):
            said = (1 - alpha ** (number + 1)) / (1 - alpha)
            choices.append(Choice((line.target_ms(1 + number) + number * pass_ms) / said, number, depth))
    return min(choices)


def study(given: Given, rng: torch.Generator) -> Seen:
    """Count the target alone, both on the CPU, and the draft on a GPU; see `models.systems`.

    Args:
        given: the model is the target; only its times count.
        rng: not used, nothing is drawn.
    """
    num_layers = given.decoder.num_layers
    cpu = best(given.times, num_layers, 1.0, 0.0)
    both = best(given.times, num_layers, FASTER, CROSSING_MS)
    line = given.times.cost.line(1)
    assert line is not None  # `best` has refused that
    alone_ms = line.target_ms(1)
    holds = both.token_ms < min(cpu.token_ms, alone_ms) and both.depth >= cpu.depth
    return Seen(alone_ms / both.token_ms, math.nan, holds)
