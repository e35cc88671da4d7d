"""Regimes that change how linear layers multiply, in the shapes of their papers' tables.

DoReFa's grid of weight, activation and gradient bits; HBFP 8_16 and 12_16 at three widths; 2:4 data gradients with and
without the L1 norm kept; sign prediction by threshold; and the lognormal gradient format against the uniform one at
equal bits. All of them train a Llama of two layers from scratch, because arithmetic shows in what can be learnt, and
the target itself is too slow to be trained a hundred times. It reads the target's tokens, the 1023 most frequent of the
training text and one for all others: most of a small model's time would go into an output matrix that no method here
touches. Each row trains at the learning rate that suits it best, and so does the float32 that it is compared with. A
method that changes inference too is scored in its own arithmetic, and beside it in floats. Formats are simulated in
float32, so the seconds say what a simulation costs, not what hardware would save.
"""

from functools import lru_cache
from itertools import chain
from typing import Any, NamedTuple

import torch

from models import catalog
from models.core.evaluation.perplexity import score
from models.core.evaluation.spread import Mean, differences, nats_per_token
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

Documents = tuple[tuple[int, ...], ...]


class Texts(NamedTuple):
    """What a cell learns and is measured on, in renumbered tokens."""

    train: Documents
    held_out: Documents


class Outcome(NamedTuple):
    """Held-out nats a token in the method's own arithmetic and in floats, seconds of training, the method's figures."""

    loss: Mean
    float_loss: Mean
    train_s: float
    figures: dict[str, float]


def rows(budget: float) -> list[Row]:
    """Return the papers' tables one after the other; `budget` scales the tokens trained on, 1 being 20,000."""
    found = [_row(BASELINE, None)]
    for weight, activation, gradient in [(8, 8, 8), (4, 4, 8), (2, 2, 8), (1, 2, 8), (1, 1, 6), (1, 32, 32)]:
        grid = {"weight_bits": weight, "activation_bits": activation, "gradient_bits": gradient}
        found.append(_row(f"dorefa-{weight}-{activation}-{gradient}", {"name": "dorefa", **grid}))
    for width in (WIDTH, *OTHER_WIDTHS):
        at = _at(width)
        if at:
            found.append(_row(f"{BASELINE}{at}", None, width))
        for mantissa in (8, 12):
            method = {"name": "hybrid_bfp", "mantissa_bits": mantissa, "wide_bits": 16}
            found.append(_row(f"hbfp-{mantissa}_16{at}", method, width))
    for suffix, preserve in (("", False), ("-l1", True)):
        found.append(_row(f"sdgp{suffix}", {"name": "sparse_data_gradient", "preserve_l1": preserve}))
    found += [_row(f"psg-{beta}", {"name": "predictive_sign_gradient", "beta": beta}) for beta in (0.0, 0.05, 0.2)]
    for num_bits in (6, 4):
        method = {"name": "lognormal_gradient", "num_bits": num_bits}
        found.append(_row(f"lognormal-{num_bits}", method))
        found.append(_row(f"uniform-{num_bits}", {**method, "exponent_bits": 1}))
    found.append(_row("lognormal-pruned-85", {"name": "lognormal_gradient", "num_bits": 32, "sparsity": 0.85}))
    return found


def tune(bench: Bench, row: Row, seed: int) -> float:
    """Train with one method; see the package."""
    texts, settings = _texts(bench, seed), row.settings
    return _run(texts, settings["width"], seed, settings["method"], settings["learning_rate"], bench.device).loss


def measure(bench: Bench, row: Row, seed: int) -> dict[str, float]:
    """Train with one method and in float32, from the same weights on the same batches; see the package."""
    texts, width = _texts(bench, seed), row.settings["width"]
    method, rate = row.settings["method"], row.settings["learning_rate"]
    plain = _float32(texts, width, seed, rate if method is None else row.settings["against_rate"], bench.device)
    outcome = plain if method is None else _run(texts, width, seed, method, rate, bench.device)
    return {
        "loss": outcome.loss,
        "gap": differences([outcome.loss], [plain.loss])[0],
        "float_loss": outcome.float_loss,
        **outcome.figures,
        "rate": rate,
        "train_s": outcome.train_s,
    }


def _row(name: str, method: dict[str, Any] | None, width: int = WIDTH) -> Row:
    """Return a row that says which one in float32 it is compared with, and at which rates to begin."""
    settings: dict[str, Any] = {"method": method, "width": width, "learning_rate": TRAINING.learning_rate}
    if method is not None:
        settings |= {"against": BASELINE + _at(width), "against_rate": TRAINING.learning_rate}
    return Row(name, settings)


def _at(width: int) -> str:
    return "" if width == WIDTH else f"-width-{width}"


@lru_cache(maxsize=16)
def _float32(texts: Texts, width: int, seed: int, rate: float, device: str) -> Outcome:
    """Kept, since each row of a seed is compared with it."""
    return _run(texts, width, seed, None, rate, device)


def _run(texts: Texts, width: int, seed: int, method: dict[str, Any] | None, rate: float, device: str) -> Outcome:
    methods = [] if method is None else [catalog.parse("regimes", method)]
    heads, sizes = width // HEAD_WIDTH, {"intermediate_size": 3 * width, "max_position_embeddings": LENGTH}
    model = evidence.small_llama(VOCABULARY, width, 2, (heads, heads), seed, device, **sizes)
    training = TRAINING.model_copy(update={"learning_rate": rate})
    trained = train_by_name(model, texts.train, training, methods, seed)
    in_floats = nats_per_token(score(model, texts.held_out, max_length=LENGTH))
    loss = evidence.own_loss(model, texts.held_out, methods, LENGTH, seed)
    return Outcome(loss, in_floats, trained.seconds, evidence.evidence(trained))


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
    return Texts(
        *(
            tuple(tuple(known.get(token, VOCABULARY - 1) for token in document) for document in documents)
            for documents in (chosen, held_out)
        )
    )
