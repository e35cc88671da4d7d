"""Served answers, in which tokens count more where the draft that served them was refused.

w = 1 where a drafted token was rejected, `others` elsewhere, all of it divided by the mean

The paper keeps the refused places alone, which is `others = 0`. What is drafted behind a refusal is never judged, so a
place that was not refused need not be one where the draft is right, and where it is right it should stay so: a little
weight for the others. A refused token that was looked up says nothing of the draft, and its place counts as they do.
"""

from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from models.core.learning.hidden import Sample
from models.params import BaseParams

PAPER = "arXiv:2310.07177, algorithm 1"
WRITES, LOGGED = False, True


class Params(BaseParams):
    """How the places are weighed.

    Attributes:
        others: what a place counts at which nothing was refused, where one with a refusal counts 1.
    """

    name: Literal["rejected"] = "rejected"
    others: float = Field(0.25, ge=0, le=1)


def weigh(samples: Sequence[Sample], params: Params) -> list[list[float]]:
    """Return the weight of each token of each answer; the mean over all that can be drafted is 1. ValueError if a
    refused place is not one of its answer's, or nothing would count, since nowhere was any refused."""
    weights = [_of_answer(sample, params.others) for sample in samples]
    drafted = [weight for of_answer in weights for weight in of_answer[1:]]
    mean = sum(drafted) / max(len(drafted), 1)
    if mean == 0:
        raise ValueError(
            f"others is 0, and the log names no refused token in {len(samples)} answers; there is nothing to learn"
        )
    return [[weight / mean for weight in of_answer] for of_answer in weights]


def _of_answer(sample: Sample, others: float) -> list[float]:
    length, refused = len(sample.completion_ids), set(sample.rejected or ())
    if outside := [place for place in refused if not 0 < place < length]:
        raise ValueError(
            f"answer {sample.id} has {length} tokens and refusals at {sorted(outside)}; wanted 1 to {length - 1}"
        )
    return [1.0 if place in refused else others for place in range(length)]
