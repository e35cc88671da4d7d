"""Pruning: what zeroing weights costs a model that is not trained again, over shares of zeroes.

Each method prunes the whole target once for each pattern, any weights up to a half of them and two of each four, and
reads held-out text after each. A seed draws the documents to calibrate on and those to read, the same for all methods.

Sized for SmolLM2-135M, of which a core reads some 400 tokens a second in float32: calibrating reads each token twice.
"""

import math
import statistics
import time

import torch
from transformers import AutoModelForCausalLM

from models import catalog
from models.layers.linears import linears
from models.perplexity import perplexity, score
from models.prune import prune_model
from models.sparsity import Pattern
from tasks.measure.comparisons import Bench, Row, draw

QUESTION = "What does zeroing the target's linear weights cost, method by method?"
BASELINE = "magnitude"
PATTERNS = {
    "10": Pattern(sparsity=0.1),
    "30": Pattern(sparsity=0.3),
    "50": Pattern(sparsity=0.5),
    "2_4": Pattern(kept=2, group=4),
}
COLUMNS = {
    "perplexity_10": "held-out perplexity, any 10% zero (lower is better)",
    "perplexity_30": "held-out perplexity, any 30% zero (lower is better)",
    "perplexity_50": "held-out perplexity, any 50% zero (lower is better)",
    "perplexity_2_4": "held-out perplexity, 2:4 (lower is better)",
    "missed": "largest distance from the zeroes asked for (share)",
    "seconds": "to prune once, mean of all (s, lower is better)",
}
LENGTH = 256
TOKENS = 1024


def rows(budget: float) -> list[Row]:
    """See `tasks.measure.comparisons`; `budget` scales the tokens that are calibrated on and read."""
    methods = [Row(name, {"method": {"name": name}}) for name in catalog.names("prune")]
    return [Row("dense", {"method": None}), *methods]


def measure(bench: Bench, row: Row, seed: int) -> dict[str, float]:
    """See `tasks.measure.comparisons`."""
    num_tokens = max(LENGTH, round(TOKENS * bench.budget))
    calibration = draw(bench.train, num_tokens, LENGTH, seed)
    held_out = draw(bench.held_out, num_tokens, LENGTH, seed)
    method = row.settings["method"]
    figures, missed, seconds = {}, [], []
    for name, pattern in PATTERNS.items():
        model = AutoModelForCausalLM.from_pretrained(bench.target_dir, dtype=torch.float32)
        if method is not None:
            started = time.perf_counter()
            prune_model(model, calibration, catalog.parse("prune", method), pattern)
            seconds.append(time.perf_counter() - started)
            weights = [layer.weight for _, layer in linears(model)]
            zeroes = sum(int((weight == 0).sum()) for weight in weights) / sum(weight.numel() for weight in weights)
            missed.append(abs(zeroes - pattern.zeroes))
        figures[f"perplexity_{name}"] = perplexity(score(model, held_out, LENGTH))
    return figures | {
        "missed": max(missed, default=math.nan),
        "seconds": statistics.fmean(seconds) if seconds else math.nan,
    }
