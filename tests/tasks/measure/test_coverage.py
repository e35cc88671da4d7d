"""How an interval of the gain is held to fresh requests, by hand and where the truth is known."""

import math
from pathlib import Path

import numpy as np
import pytest

from models.acceptance import Estimate
from models.hidden import Sample
from models.paired import Score
from tasks.measure.coverage import AIM, FIRST, PUPIL, SERVED, Split, Traffic, estimate, make_report, mean_gain, summary
from tasks.measure.coverage import split as draw_log

K = 3
NUM_GROUPS, PER_GROUP = 60, 5


def sample(id: str, domain: str = "code", cluster: str = "") -> Sample:
    return Sample(id, domain, [1, 2], [3, 4, 5], cluster=cluster)


def scores(accepted: dict[str, float], domain: str = "code") -> dict[str, Score]:
    return {id: Score(id=id, domain=domain, steps=10, accepted=10 * rate) for id, rate in accepted.items()}


def test_a_gains_error_is_that_of_groups() -> None:
    first, later = scores(dict.fromkeys("abcd", 0.5)), scores({"a": 0.8, "b": 0.8, "c": 1.2, "d": 1.2})
    grouped = [sample(id, cluster="m" if id in "ab" else "n") for id in "abcd"]
    value, error = mean_gain(grouped, first, later, {"code": 1.0})
    assert value == pytest.approx(0.5)
    assert error == pytest.approx(math.sqrt(2 * 0.4**2) / 4)
    alone = [sample(id) for id in "abcd"]
    assert mean_gain(alone, first, later, {"code": 1.0}).error == pytest.approx(math.sqrt(4 * 0.2**2) / 4)


def test_domains_count_by_their_share() -> None:
    first = scores({"a": 0.5}) | scores({"b": 0.5}, "chat")
    later = scores({"a": 1.5}) | scores({"b": 0.5}, "chat")
    samples = [sample("a"), sample("b", "chat")]
    assert mean_gain(samples, first, later, {"code": 0.25, "chat": 0.75}).value == pytest.approx(0.25)


def test_an_interval_is_told_over_clusters() -> None:
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
    held = [(Estimate(value=mid, low=mid - 0.1, high=mid + 0.1), 0.25) for mid in (0.0, 0.2, 0.3, 0.45)]
    told = summary(held)
    assert (told["covered"], told["too_low"], told["too_high"]) == (2, 1, 1)
    assert (told["half_width"], told["truth"]) == (pytest.approx(0.1), pytest.approx(0.25))


def planted(shift: float = 0.0, served_gain: float = 0.5) -> tuple[Traffic, dict[str, dict[str, Score]]]:
    """Return requests of groups whose gains are drawn around 0.6, with a served draft that gains something else.

    Args:
        shift: of the gain of those that the window of the served draft told, over 0.5.
        served_gain: of the served draft on fresh requests.
    """
    rng = np.random.default_rng(1)
    fresh = [sample(f"f{n}", cluster=f"g{n % NUM_GROUPS}") for n in range(NUM_GROUPS * PER_GROUP)]
    told = [sample(f"t{n}", cluster=f"h{n}") for n in range(30)]
    of_group = {f"g{n}": 0.6 + 0.15 * rng.standard_normal() for n in range(NUM_GROUPS)}
    everything = [one.id for one in (*fresh, *told)]
    noise = dict(zip(everything, 0.2 * rng.standard_normal(len(everything)), strict=True))
    pupil = {one.id: 1.0 + of_group[one.cluster] + noise[one.id] for one in fresh}
    served = {one.id: 1.0 + served_gain + noise[one.id] for one in fresh}
    served |= {one.id: 1.5 + shift + noise[one.id] for one in told}
    base = scores(dict.fromkeys(everything, 1.0))
    return Traffic(fresh, fresh[:20], told), {FIRST: base, SERVED: scores(served), PUPIL: base | scores(pupil)}


def drawn(traffic: Traffic, number: int) -> Split:
    """Return a log of half of the groups' requests, judged by a third of its clusters."""
    rng = np.random.default_rng([2, number])
    log = [traffic.fresh[place] for place in rng.permutation(len(traffic.fresh))[: len(traffic.fresh) // 2]]
    judging = set(rng.choice(NUM_GROUPS, NUM_GROUPS // 3, replace=False).tolist())
    kept = [one for one in log if int(one.cluster[1:]) in judging]
    return Split([one.id for one in log], {one.id: (one.cluster, 1.0) for one in kept})


@pytest.mark.parametrize(
    ("shift", "served_gain", "verdict"),
    [(0.0, 0.5, "meets"), (0.0, 0.8, "meets"), (0.4, 0.5, "misses")],
    ids=["as told", "known groups are served better", "the served draft promises too much"],
)
def test_logs_that_are_drawn_anew_are_held_as_often_as_they_say(shift: float, served_gain: float, verdict: str) -> None:
    traffic, scored = planted(shift, served_gain)
    report = make_report(traffic, scored, [drawn(traffic, number) for number in range(200)], K)
    assert report.figures["logs"]["covered"] >= AIM * 200
    assert report.verdict.startswith(f"{verdict} the bar")


def test_intervals_of_single_conversations_would_be_too_narrow_and_are_found_out() -> None:
    traffic, scored = planted()
    splits = [drawn(traffic, number) for number in range(200)]
    apart = [Split(one.log, {id: (id, 1.0) for id in one.judged}) for one in splits]
    assert make_report(traffic, scored, apart, K).verdict.startswith("misses the bar")


def test_a_log_is_a_half_and_each_of_its_groups_is_a_cluster(tiny_target: Path) -> None:
    rng = np.random.default_rng(3)
    fresh = [
        sample(f"f{n}", cluster=f"g{n % NUM_GROUPS}")._replace(prompt_ids=rng.integers(5, 200, 30).tolist())
        for n in range(NUM_GROUPS * PER_GROUP)
    ]
    one, same, other = (draw_log(fresh, number, 0, 0.35, tiny_target) for number in (0, 0, 1))
    assert one == same != other
    assert len(set(one.log)) == len(fresh) // 2
    group_of = {sample.id: sample.cluster for sample in fresh}
    assert one.judged.keys() <= set(one.log)
    assert len({cluster for cluster, _ in one.judged.values()}) == len({group_of[id] for id in one.judged})


def test_a_log_without_a_conversation_to_be_judged_by_is_refused() -> None:
    traffic, scored = planted()
    with pytest.raises(ValueError, match="1 of 1 logs have no conversation"):
        make_report(traffic, scored, [Split(["f0"], {})], K)
