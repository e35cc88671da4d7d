"""Regimes that change how linear layers multiply, in the shapes of their papers' tables.

All of them train a Llama of two layers from scratch, because arithmetic shows in what can be learnt, and the target
itself is too slow to be trained a hundred times. It reads the target's tokens, the 1023 most frequent of the training
text and one for all others: most of its time would go into an output matrix that no method here touches. Each row
trains at the learning rate that suits it best, and so does the float32 that it is compared with. A method that changes
inference too is scored in its own arithmetic, and beside it in floats. Formats are simulated in float32, so the seconds
say what a simulation costs, not what hardware would save.
"""

from functools import lru_cache
from itertools import chain
from typing import Any

import torch

from models import catalog
from models.core.evaluation.perplexity import score
from models.core.evaluation.spread import differences, nats_per_token
from models.core.learning.training import train_by_name
from models.params import TrainingParams
from tasks.measure import evidence, sweep
from tasks.measure.comparisons import Bench, Row, commonest, first_by_domain, shuffled, up_to

QUESTION = "How few bits, or how much of the gradient, does training get by with?"
BASELINE = "float32"
COLUMNS = {
    "loss": "held-out, in the method's own arithmetic, nats/token ↓",
    "gap": "above float32 of this width and seed, nats/token ↓",
    "float_loss": "held-out, the same weights in floats, nats/token ↓",
    **evidence.COLUMNS,
    **sweep.COLUMNS,
    "train_s": "training at that rate, s ↓",
}
WIDTH, OTHER_WIDTHS, HEAD_WIDTH = 128, (64, 192), 32
VOCABULARY, LENGTH, NUM_TOKENS, NUM_HELD_OUT = 1024, 64, 20_000, 48
TRAINING = TrainingParams(learning_rate=3e-3, batch_tokens=512, max_length=LENGTH)

# What a cell learns and is measured on, in renumbered tokens.
Texts = tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...]]


def rows(budget: float) -> list[Row]:
    """Return the papers' tables one after the other; `budget` scales the tokens trained on, 1 being 20,000."""
    found: dict[str, tuple[dict[str, Any] | None, int]] = {BASELINE: (None, WIDTH)}
    bits = ("weight_bits", "activation_bits", "gradient_bits")
    for grid in [(8, 8, 8), (4, 4, 8), (2, 2, 8), (1, 2, 8), (1, 1, 6), (1, 32, 32)]:
        found[f"dorefa-{'-'.join(map(str, grid))}"] = {"name": "dorefa", **dict(zip(bits, grid, strict=True))}, WIDTH
    for width in (WIDTH, *OTHER_WIDTHS):
        found[BASELINE + _at(width)] = None, width
        for mantissa in (8, 12):
            method = {"name": "hybrid_bfp", "mantissa_bits": mantissa, "wide_bits": 16}
            found[f"hbfp-{mantissa}_16{_at(width)}"] = method, width
    lognormal = {"name": "lognormal_gradient"}
    others: dict[str, dict[str, Any]] = {
        **{f"sdgp{end}": {"name": "sparse_data_gradient", "preserve_l1": bool(end)} for end in ("", "-l1")},
        **{f"psg-{beta}": {"name": "predictive_sign_gradient", "beta": beta} for beta in (0.0, 0.05, 0.2)},
        **{
            f"{grid}-{num_bits}": {**lognormal, "num_bits": num_bits, **exponents}
            for num_bits in (6, 4)
            for grid, exponents in (("lognormal", {}), ("uniform", {"exponent_bits": 1}))
        },
        "lognormal-pruned-85": {**lognormal, "num_bits": 32, "sparsity": 0.85},
    }
    return [_row(name, *of) for name, of in found.items()] + [_row(name, method) for name, method in others.items()]


def tune(bench: Bench, row: Row, seed: int) -> float:
    width, method, rate = (row.settings[key] for key in ("width", "method", "learning_rate"))
    return _run(_texts(bench, seed), width, seed, method, rate, bench.device)["loss"]


def measure(bench: Bench, row: Row, seed: int) -> dict[str, float]:
    width, method, rate = (row.settings[key] for key in ("width", "method", "learning_rate"))
    texts = _texts(bench, seed)
    plain = _float32(texts, width, seed, rate if method is None else row.settings["against_rate"], bench.device)
    found = plain if method is None else _run(texts, width, seed, method, rate, bench.device)
    return {**found, "gap": differences([found["loss"]], [plain["loss"]])[0], "rate": rate}


def _row(name: str, method: dict[str, Any] | None, width: int = WIDTH) -> Row:
    """Return a row that says which one in float32 it is compared with, and at which rates to begin."""
    settings: dict[str, Any] = {"method": method, "width": width, "learning_rate": TRAINING.learning_rate}
    if method is not None:
        settings |= {"against": BASELINE + _at(width), "against_rate": TRAINING.learning_rate}
    return Row(name, settings)


def _at(width: int) -> str:
    return "" if width == WIDTH else f"-width-{width}"


@lru_cache(maxsize=16)
def _float32(texts: Texts, width: int, seed: int, rate: float, device: str) -> dict[str, float]:
    """Kept, since each row of a seed is compared with it."""
    return _run(texts, width, seed, None, rate, device)


def _run(
    texts: Texts, width: int, seed: int, method: dict[str, Any] | None, rate: float, device: str
) -> dict[str, float]:
    methods = [] if method is None else [catalog.parse("regimes", method)]
    documents, held_out = texts
    heads, sizes = width // HEAD_WIDTH, {"intermediate_size": 3 * width, "max_position_embeddings": LENGTH}
    model = evidence.small_llama(VOCABULARY, width, 2, (heads, heads), seed, device, **sizes)
    training = TRAINING.model_copy(update={"learning_rate": rate})
    trained = train_by_name(model, documents, training, methods, seed)
    return {
        "float_loss": nats_per_token(score(model, held_out, max_length=LENGTH)),
        "loss": evidence.own_loss(model, held_out, methods, LENGTH, seed),
        **evidence.evidence(trained),
        "train_s": trained.seconds,
    }


def _texts(bench: Bench, seed: int) -> Texts:
    """Draw pieces of training text up to the budget, by seed; held-out text is the same for all, of each domain."""
    known = {token: number for number, token in enumerate(commonest(bench.train, VOCABULARY - 1))}
    pieces = [
        document[start : start + LENGTH]
        for _, documents in sorted(bench.train.items())
        for document in documents
        for start in range(0, len(document) - 1, LENGTH)
    ]
    chosen = up_to(shuffled(pieces, torch.Generator().manual_seed(seed)), NUM_TOKENS * bench.budget)
    held_out = chain.from_iterable(first_by_domain(bench.held_out, NUM_HELD_OUT, LENGTH).values())
    learnt, read = (
        tuple(tuple(known.get(token, VOCABULARY - 1) for token in document) for document in documents)
        for documents in (chosen, held_out)
    )
    return learnt, read
