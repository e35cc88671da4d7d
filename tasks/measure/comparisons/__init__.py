"""What `redraft compare FAMILY` measures: one file a family, of the same shape.

A file has

- `QUESTION`: what its table answers, a sentence;
- `BASELINE`: the name of the row the others are compared with;
- `COLUMNS`: metric to heading, with the unit and which way is better;
- `rows(budget) -> list[Row]`: what is compared; `budget` scales how much is trained or calibrated, 1 being minutes for
  the whole family on two cores;
- `measure(bench, row, seed) -> dict[str, float]`: one row under one seed, all of `COLUMNS` and nothing else; a metric
  that makes no sense for a row is NaN, one that is a mean over documents is of type
  `models.core.evaluation.spread.Mean`, so that rows are compared document by document;
- `tune(bench, row, seed) -> float`, optional: the loss of a row on `bench.held_out` after training at the rate that its
  settings call `learning_rate`; rows that have one are then measured at their best rate (`tasks.measure.sweep`);
- `TIMED`, optional: true where rows are told apart by what they take, so that none is measured beside another;
- `claims(report, found) -> Report`, optional: the report with what the rows' papers claim beside what was seen.

Rows and seeds are measured in any order, each kept as soon as it is finished, so `measure` depends on its arguments
alone. What they draw from is said here once; torch is not imported, because listing the comparisons imports this.
"""

import random
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from itertools import chain, zip_longest
from pathlib import Path
from pkgutil import iter_modules
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from models.params import did_you_mean

if TYPE_CHECKING:
    import torch

ItemT = TypeVar("ItemT")
# metric → its value; None where it makes no sense for the row.
Metrics = dict[str, float | None]


class Row(NamedTuple):
    """One line of a table: its heading, good for a file's name, and what `measure` needs to know, as JSON."""

    name: str
    settings: dict[str, Any]


class Bench(NamedTuple):
    """What all rows of a table share.

    Documents to train or calibrate on, and of other groups to measure on, are token ids by domain; `budget` is as given
    to `rows`, `work_dir` an empty folder of this cell's own, removed afterwards; the draft is the target's champion, if
    any, and K as served.
    """

    target_dir: Path
    train: dict[str, list[list[int]]]
    held_out: dict[str, list[list[int]]]
    budget: float
    work_dir: Path
    draft_dir: Path | None = None
    num_draft_tokens: int = 3
    device: str = "cpu"


def families() -> list[str]:
    """Return the names of the comparisons there are; none is imported."""
    return sorted(module.name for module in iter_modules(__path__))


def load_comparison(family: str) -> ModuleType:
    """Import a comparison; ValueError names the nearest one if there is none of that name."""
    if family not in (known := families()):
        raise ValueError(f'no family to compare is called "{family}"{did_you_mean(family, known)}')
    return import_module(f"{__name__}.{family}")


def draw(documents: Mapping[str, Sequence[list[int]]], num_tokens: int, max_length: int, seed: int) -> list[list[int]]:
    """Draw documents of all domains in turn, in an order of the seed's; ValueError if none has two tokens.

    Each loses what is longer than `max_length`, and the last one what is more than `num_tokens` in all.
    """
    rng = random.Random(seed)
    drawn: list[list[int]] = []
    for document in in_turn(rng.sample(documents[domain], len(documents[domain])) for domain in sorted(documents)):
        piece = document[: min(max_length, num_tokens)]
        if len(piece) > 1:
            drawn.append(piece)
            num_tokens -= len(piece)
    if not drawn:
        raise ValueError(f"no document of two tokens in {len(documents)} domains, or num_tokens is below 2")
    return drawn


def shuffled(items: Sequence[ItemT], rng: "torch.Generator") -> list[ItemT]:
    import torch

    return [items[place] for place in torch.randperm(len(items), generator=rng).tolist()]


def in_turn(domains: Iterable[Sequence[list[int]]]) -> Iterator[list[int]]:
    """Yield the first document of each domain, then the second of each, and so on; empty ones are left out."""
    return filter(None, chain.from_iterable(zip_longest(*domains)))


def up_to(documents: Iterable[list[int]], num_tokens: float) -> list[list[int]]:
    """Return the first documents, all of them whole: the last is the one that reaches `num_tokens`."""
    taken: list[list[int]] = []
    for document in documents:
        if num_tokens <= 0:
            break
        taken.append(document)
        num_tokens -= len(document)
    return taken


def first_by_domain(
    domains: Mapping[str, Sequence[list[int]]], num_documents: int, max_length: int, min_length: int = 2
) -> dict[str, list[list[int]]]:
    """Return domain to its share of `num_documents`, at least one, cut to `max_length`; the same under every seed."""
    share = max(1, num_documents // len(domains))
    return {
        domain: [document[:max_length] for document in domains[domain] if len(document) >= min_length][:share]
        for domain in sorted(domains)
    }


def commonest(domains: Mapping[str, Sequence[list[int]]], num_tokens: int) -> list[int]:
    """Return the most frequent token ids; of equally frequent ones those that come first, domains in order of name."""
    counts = Counter(token for domain in sorted(domains) for document in domains[domain] for token in document)
    return [token for token, _ in counts.most_common(num_tokens)]
