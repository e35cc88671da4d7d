"""Times of parts that are easy to reckon with."""

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from models.core.layers.decoder import WideDecoder
from models.core.throughput.cost import Cost, Time
from models.systems import Times
from models.targets import random


def times(
    attention_ms: dict[int, float], mlp_ms: dict[int, float], rest_ms: float, meet_ms: float, row_ms: float = 0.0
) -> Times:
    """Return times whose whole pass takes its parts' at one row, and so much more for each further row."""
    one = attention_ms[1] + mlp_ms[1] + rest_ms
    cost = Cost.measured([Time(1, rows, 0, one + (rows - 1) * row_ms) for rows in (1, 2, 16)])
    return Times(cost, attention_ms, mlp_ms, rest_ms, meet_ms)


EASY = times({size: 8.0 / size for size in (1, 2, 3, 4)}, {size: 8.0 / size for size in (1, 2, 3, 4)}, 0.0, 0.0)


def eight_layers(directory: Path, idle: Sequence[int] = (), parts: Sequence[str] = ()) -> WideDecoder:
    """Return a random decoder, in some of whose layers some parts add nothing."""
    random.build(random.Params(num_layers=8), directory)
    if idle:
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        for layer in idle:
            for part in parts:
                model.model.layers[layer].get_submodule(part).weight.data.zero_()
        model.save_pretrained(directory)
    return WideDecoder.load(directory, torch.float32)
