"""Fillings of a template that much of a domain uses: what a window tells of its gain, beside the planted truth.

The draft is one that remembers: it gains by the share of a prompt's 5-grams that it was trained on. What fills the
template is about something that is asked a few times in a row, in much the same words, and never again. So what a log
is judged by must be as new to what was trained as the requests after it; the template itself goes on being asked.
"""

import hashlib
from pathlib import Path

import numpy as np
import pytest

from models.core.evaluation.paired import Score
from models.core.learning.hidden import Sample
from models.types import Estimate
from tasks.stages.split import cluster_samples
from tests.benchmarks.coverage import judged_by
from tests.benchmarks.intervals import estimate, summary

NUM_ROWS, NUM_FRESH, MOST_ASKED = 200, 600, 4
FILLING, NGRAM = 20, 5  # tokens
TEMPLATE = np.random.default_rng(0).integers(5, 250, 30)
K, HELD_OUT, SPREAD, LEARNT = 3, 0.25, 0.25, 0.6
NUM_LOGS = 50


def drawn(share: float, rng: np.random.Generator, number: int, prefix: str) -> list[Sample]:
    """Draw requests of which a share fills one template; each thing is asked for 1 to `MOST_ASKED` times."""
    samples: list[Sample] = []
    while len(samples) < number:
        front = TEMPLATE if rng.random() < share else rng.integers(5, 250, len(TEMPLATE))
        thing = rng.integers(5, 250, FILLING)
        for _ in range(rng.integers(1, MOST_ASKED + 1)):
            said = thing.copy()
            said[rng.integers(FILLING)] = rng.integers(5, 250)
            samples.append(Sample(f"{prefix}{len(samples)}", "code", [*front.tolist(), *said.tolist()], [4, 5, 6]))
    return samples


def grams(sample: Sample) -> set[tuple[int, ...]]:
    ids = sample.prompt_ids
    return {tuple(ids[start : start + NGRAM]) for start in range(len(ids) - NGRAM + 1)}


def told(logged: list[Sample], fresh: list[Sample], home: int, target: Path, by_prompt: bool) -> tuple[Estimate, float]:
    """Return the gain that a log is told to have, and what a draft that learnt from it has on fresh requests.

    A log is split by the secret of a `home`, or prompt by prompt, as if none were alike.
    """
    rng, name = np.random.default_rng([7, home]), f"home {home}"
    if by_prompt:
        inside = rng.random(len(logged)) < 0.5
        judged = {one.id: (one.id, 1.0) for one, held in zip(logged, inside, strict=True) if held}
        clusters = [one.id for one in logged]
    else:
        judged = judged_by(logged, name, HELD_OUT, target).judged
        secret = hashlib.sha256(name.encode()).digest()
        clusters = [row.cluster for row in cluster_samples(logged, secret, target)]
    kept = {cluster for cluster, _ in judged.values()}
    trained = [one for one, cluster in zip(logged, clusters, strict=True) if cluster not in kept]
    assert len(trained) > 0.2 * NUM_ROWS
    known = set().union(*(grams(one) for one in trained))

    def gain(sample: Sample) -> float:
        own = grams(sample)
        return LEARNT * len(own & known) / len(own)

    first = {id: Score(id=id, domain="code", steps=20, accepted=20.0) for id in judged}
    gains = {one.id: gain(one) + SPREAD * rng.standard_normal() for one in logged if one.id in judged}
    later = {id: first[id].model_copy(update={"accepted": 20 * (1 + one)}) for id, one in gains.items()}
    return estimate(judged, first, later, {"code": 1.0}, K), float(np.mean([gain(one) for one in fresh]))


def windows(share: float, target: Path, by_prompt: bool = False) -> dict[str, float]:
    rng = np.random.default_rng(1)
    both = ((drawn(share, rng, NUM_ROWS, "l"), drawn(share, rng, NUM_FRESH, "f")) for _ in range(NUM_LOGS))
    found = summary([told(*logs, number, target, by_prompt) for number, logs in enumerate(both)])
    print(f"template in {share:.0%}{', by prompt' if by_prompt else ''}: {found}")
    return found


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.1, 0.6])
def test_a_template_that_much_of_a_domain_uses_does_not_overstate_the_gain(share: float, tiny_target: Path) -> None:
    found = windows(share, tiny_target)
    assert abs(found["mean"] - found["truth"]) < 0.015
    assert found["covered"] >= 0.9 * NUM_LOGS  # of 50 that hold with a chance of 95% each, 19 in 20 times 45 do


@pytest.mark.slow
def test_where_what_fills_it_were_split_prompt_by_prompt_the_gain_would_be_overstated(tiny_target: Path) -> None:
    found = windows(0.6, tiny_target, by_prompt=True)
    assert found["mean"] > found["truth"] + 0.05
    assert found["covered"] < 0.5 * NUM_LOGS
