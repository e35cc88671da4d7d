"""How an interval of the gain is held to fresh requests, by hand."""

import math

import numpy as np
import pytest

from models.acceptance import Estimate
from models.hidden import Sample
from models.paired import Score
from tasks.measure.coverage import ALL, FIRST, PUPIL, SERVED, UNSEEN, Traffic, estimate, make_report, mean_gain, summary

K = 3


def sample(id: str, domain: str = "code") -> Sample:
    return Sample(id, domain, [1, 2], [3, 4, 5])


def scores(accepted: dict[str, float], domain: str = "code") -> dict[str, Score]:
    return {id: Score(id=id, domain=domain, steps=10, accepted=10 * rate) for id, rate in accepted.items()}


def test_a_gains_error_is_that_of_groups() -> None:
    first, served = scores(dict.fromkeys("abcd", 0.5)), scores({"a": 0.8, "b": 0.8, "c": 1.2, "d": 1.2})
    samples, groups = [sample(id) for id in "abcd"], {"a": "m", "b": "m", "c": "n", "d": "n"}
    value, error = mean_gain(samples, first, served, {"code": 1.0}, groups)
    assert value == pytest.approx(0.5)
    assert error == pytest.approx(math.sqrt(2 * 0.4**2) / 4)
    assert mean_gain(samples, first, served, {"code": 1.0}, {}).error == pytest.approx(math.sqrt(4 * 0.2**2) / 4)


def test_domains_count_by_their_share() -> None:
    first = scores({"a": 0.5}) | scores({"b": 0.5}, "chat")
    served = scores({"a": 1.5}) | scores({"b": 0.5}, "chat")
    samples = [sample("a"), sample("b", "chat")]
    assert mean_gain(samples, first, served, {"code": 0.25, "chat": 0.75}, {}).value == pytest.approx(0.25)


def test_an_interval_is_told_over_the_clusters_of_the_split() -> None:
    rng = np.random.default_rng(0)
    ids = [f"{number}" for number in range(40)]
    champion = scores(dict.fromkeys(ids, 0.5))
    challenger = scores({id: 0.7 + 0.1 * rng.standard_normal() for id in ids})
    alone = estimate({id: (id, 1.0) for id in ids}, champion, challenger, {"code": 1.0}, K)
    pairs = estimate({id: (str(int(id) // 10), 1.0) for id in ids}, champion, challenger, {"code": 1.0}, K)
    assert alone.low < 0.2 < alone.high
    assert pairs.value == pytest.approx(alone.value)
    assert pairs.high - pairs.low != pytest.approx(alone.high - alone.low)


def test_what_lies_outside_is_counted_by_its_side() -> None:
    found = [Estimate(value=mid, low=mid - 0.1, high=mid + 0.1) for mid in (0.0, 0.2, 0.3, 0.45)]
    told = summary(found, 0.25)
    assert (told["covered"], told["too_low"], told["too_high"]) == (2, 1, 1)
    assert told["half_width"] == pytest.approx(0.1)


def of_three(served_gain: float, pupil_gain: float) -> tuple[Traffic, dict[str, dict[str, Score]], list[str]]:
    """Return 60 rows, of which 40 are new to the served draft, with what drafts gain on 60 fresh requests."""
    rng = np.random.default_rng(1)
    logged, fresh = [f"l{number}" for number in range(60)], [f"f{number}" for number in range(60)]
    base = dict.fromkeys([*logged, *fresh], 0.5)

    def gaining(gains: dict[str, float]) -> dict[str, Score]:
        return scores({id: 0.5 + gain + 0.05 * rng.standard_normal() for id, gain in gains.items()})

    served = dict.fromkeys(logged[:40], 0.2) | dict.fromkeys(logged[40:], 0.9) | dict.fromkeys(fresh, served_gain)
    pupil = dict.fromkeys(logged, 0.3) | dict.fromkeys(fresh, pupil_gain)
    samples = ([sample(id) for id in ids] for ids in (logged, fresh, fresh))
    scored = {FIRST: scores(base), SERVED: gaining(served), PUPIL: gaining(pupil)}
    return Traffic(*samples, groups={}), scored, logged[:40]


@pytest.mark.parametrize(
    ("served_gain", "pupil_gain", "verdict"),
    [(0.2, 0.3, "meets"), (0.4, 0.3, "meets"), (0.0, 0.3, "misses"), (0.2, 0.6, "misses")],
    ids=["as split", "known groups are served better", "the served draft promises too much", "the pupil does not hold"],
)
def test_the_bar_is_held_by_who_learnt_nothing_and_by_promises(
    served_gain: float, pupil_gain: float, verdict: str
) -> None:
    traffic, scored, unseen = of_three(served_gain, pupil_gain)
    rng = np.random.default_rng(2)
    splits = [
        {id: (id, 1.0) for id in rng.choice([one.id for one in traffic.logged], 30, replace=False)} for _ in range(20)
    ]
    report = make_report(traffic, scored, unseen, splits, K)
    assert report.verdict.startswith(f"{verdict} the bar")
    assert report.figures["fresh"][SERVED]["value"] == pytest.approx(served_gain, abs=0.03)
    assert report.figures["learnt_rows"]["value"] == pytest.approx(0.9, abs=0.03)
    assert report.figures["sides"][ALL]["mean"] > report.figures["sides"][UNSEEN]["mean"] + 0.1


def test_a_split_without_a_conversation_to_be_judged_by_is_refused() -> None:
    both = scores({"a": 0.5})
    traffic = Traffic([sample("a")], [sample("a")], [sample("a")], {})
    with pytest.raises(ValueError, match="1 of 1 splits have no conversation"):
        make_report(traffic, {FIRST: both, SERVED: both, PUPIL: both}, [], [{"a": ("a", 1.0)}], K)
