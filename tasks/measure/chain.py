"""A target after stages of a recipe, changed and stored as flow `build` does it, for a comparison to measure.

What a stage promises of the weights, zeroes or a rank, is looked for in what every later one stores: a chain that loses
it is refused.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig

from models.core.checkpoints.invariants import noted
from models.core.checkpoints.loading import load_model
from models.stages import TABLES
from tasks.change_model import CHANGES
from tasks.measure.comparisons import Bench, shuffled
from tasks.stages.change_target import Start, store

COLUMNS = {"promised": "layers that kept the zeroes or the rank of an earlier stage"}


def make(bench: Bench, tables: Mapping[str, Any], seed: int) -> Path:
    """Return the directory of the bench's target after the stages of these tables of a recipe, by name in `CHANGES`.

    ValueError if a table can't be parsed, the chain loses what a stage promised, or as the stages raise it.
    """
    rng = torch.Generator().manual_seed(seed)
    train = {domain: shuffled(bench.train[domain], rng) for domain in sorted(bench.train)}
    directory = bench.target_dir
    for name in (name for name in CHANGES if name in tables):
        made, work = bench.work_dir / name, bench.work_dir / f"{name}-work"
        made.mkdir()
        work.mkdir()
        start = Start(load_model(directory, device=bench.device), train, work, lambda progress: None)
        store(CHANGES[name](TABLES[name].model_validate(tables[name]), seed, start), made, directory)
        directory = made
    return directory


def num_promised(config: PretrainedConfig) -> float:
    """Return of how many layers a checked target promises something, as `COLUMNS` shows it; NaN for none."""
    patterns, ranks = noted(config)
    return float(len(patterns.keys() | ranks.keys())) or math.nan
