"""Pruning: what zeroing weights costs a model that is not trained again, over shares of zeroes.

Each method prunes the whole target once for each pattern; "random" is the control that chooses weights by lot. A seed
draws the documents to calibrate on and those to read, the same for all rows. Calibrated is on `ENOUGH` tokens for each
input of the widest layer: on fewer, methods that update weights fit the sample, and lose to those that don't. How much
text is enough shows in the rows "…, a quarter of the text" and "…, half of the text".
"""

import math
import time
from typing import Any

import torch
from transformers import PreTrainedModel

from models import catalog
from models.core.checkpoints.loading import load_model
from models.core.checkpoints.sparsity import Pattern
from models.core.evaluation.perplexity import score
from models.core.evaluation.spread import perplexity
from models.core.layers.linears import enough_tokens, linears
from models.prune import prune_model
from tasks.measure import likeness
from tasks.measure.comparisons import Bench, Row, draw

QUESTION = "What does zeroing the target's linear weights cost, method by method?"
BASELINE = "dense"
CONTROL = "random"
PATTERNS: dict[str, Any] = {"10%": 0.1, "30%": 0.3, "50%": 0.5, "2:4": "2:4"}
COLUMNS = {
    "perplexity": "held-out perplexity (lower is better)",
    **likeness.COLUMNS,
    "calibrated_tokens": "tokens calibrated on",
    "missed": "distance from the zeroes asked for (share)",
    "seconds": "to prune once (s, lower is better)",
}
CURVE = {"a quarter of the text": 0.25, "half of the text": 0.5}  # at the last pattern
LENGTH = 256
READ_TOKENS = 2048


def rows(budget: float) -> list[Row]:
    """See `tasks.measure.comparisons`; `budget` scales the tokens that are calibrated on and read."""
    return [
        Row(BASELINE, {}),
        *(
            Row(f"{name} {spelt}", {"method": None if name == CONTROL else {"name": name}, "pattern": pattern})
            for spelt, pattern in PATTERNS.items()
            for name in (*catalog.names("prune"), CONTROL)
        ),
        *(
            Row(f"{name} {spelt}, {heading}", {"method": {"name": name}, "pattern": pattern, "text": share})
            for spelt, pattern in list(PATTERNS.items())[-1:]
            for name in catalog.names("prune")
            if catalog.load("prune", name).CALIBRATED
            for heading, share in CURVE.items()
        ),
    ]


def measure(bench: Bench, row: Row, seed: int) -> dict[str, float]:
    model = load_model(bench.target_dir, device=bench.device)
    held_out = draw(bench.held_out, max(LENGTH, round(READ_TOKENS * bench.budget)), LENGTH, seed)
    costs = dict.fromkeys(("calibrated_tokens", "missed", "seconds"), math.nan)
    if row.settings:
        method, pattern = row.settings["method"], Pattern.model_validate(row.settings["pattern"])
        wanted = max(LENGTH, round(enough_tokens(model) * bench.budget * row.settings.get("text", 1.0)))
        calibrated = method is not None and catalog.load("prune", method["name"]).CALIBRATED
        calibration = draw(bench.train, wanted, LENGTH, seed) if calibrated else []
        started = time.perf_counter()
        if method is None:
            _prune_by_lot(model, pattern, seed)
        else:
            prune_model(model, calibration, catalog.parse("prune", method), pattern)
        weights = [layer.weight for _, layer in linears(model)]
        zeroes = sum(int((weight == 0).sum()) for weight in weights) / sum(weight.numel() for weight in weights)
        costs = {
            "calibrated_tokens": float(sum(map(len, calibration))),
            "missed": abs(zeroes - pattern.zeroes),
            "seconds": time.perf_counter() - started,
        }
    return {
        "perplexity": perplexity(score(model, held_out, LENGTH)),
        **likeness.measure_likeness(bench, model, held_out),
        **costs,
    }


@torch.no_grad()
def _prune_by_lot(model: PreTrainedModel, pattern: Pattern, seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    for _, layer in linears(model):
        drawn = torch.rand(layer.weight.shape, generator=rng).to(layer.weight.device)
        layer.weight.mul_(pattern.keep(drawn, over="row"))
