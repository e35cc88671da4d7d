"""How an interval of the gain is held to fresh requests, by hand and where the truth is known."""

import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from infra.querylog import QueryLog
from models.core.evaluation.paired import Score
from models.core.learning.hidden import Sample
from models.recipe import Refresh
from models.types import Estimate
from tasks.stages.split import MOST_OF_GROUP
from tests.benchmarks.coverage import FIRST, PUPIL, SERVED, Traffic, figures, judged_by, logged_samples
from tests.benchmarks.coverage import split as draw_log
from tests.benchmarks.intervals import Split, estimate, mean_gain, summary
from tests.infra.rows import row

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


def planted(
    shift: float = 0.0, served_gain: float = 0.5, steeper: float = 0.0
) -> tuple[Traffic, dict[str, dict[str, Score]]]:
    """Return requests of groups whose gains are drawn around 0.6, with a served draft that gains something else.

    Groups are asked unequally often, up to twenty times as much as others.

    Args:
        shift: of the gain of those that the window of the served draft told, over 0.5.
        served_gain: of the served draft on fresh requests.
        steeper: by how much more a group gains than one that is asked half as often.
    """
    rng = np.random.default_rng(1)
    halvings = np.log2(20) * rng.random(NUM_GROUPS) ** 2
    popularity = 2**halvings / (2**halvings).sum()

    def asked(prefix: str) -> list[Sample]:
        groups = rng.choice(NUM_GROUPS, NUM_GROUPS * PER_GROUP, p=popularity).tolist()
        return [sample(f"{prefix}{n}", cluster=f"g{group}") for n, group in enumerate(groups)]

    fresh, logged = asked("f"), asked("l")
    told = [sample(f"t{n}", cluster=f"h{n}") for n in range(30)]
    gains = 0.6 + 0.15 * rng.standard_normal(NUM_GROUPS) + steeper * halvings
    of_group = {f"g{n}": float(gain) for n, gain in enumerate(gains)}
    everything = [one.id for one in (*fresh, *logged, *told)]
    noise = dict(zip(everything, 0.2 * rng.standard_normal(len(everything)), strict=True))
    pupil = {one.id: 1.0 + of_group[one.cluster] + noise[one.id] for one in (*fresh, *logged)}
    served = {one.id: 1.0 + served_gain + noise[one.id] for one in fresh}
    served |= {one.id: 1.5 + shift + noise[one.id] for one in told}
    base = scores(dict.fromkeys(everything, 1.0))
    traffic = Traffic(fresh, fresh[:20], told, logged)
    return traffic, {FIRST: base, SERVED: scores(served), PUPIL: base | scores(pupil)}


def judging(log: list[Sample], rng: np.random.Generator, equal: bool = False) -> Split:
    """Split a log: half of its groups judge, up to four of each group's requests.

    Args:
        log: what is split.
        rng: drawn from.
        equal: a group weighs as much however often it is asked.
    """
    names = sorted({one.cluster for one in log})
    judged: dict[str, tuple[str, float]] = {}
    for name in rng.choice(names, len(names) // 2, replace=False).tolist():
        members = [one.id for one in log if one.cluster == name]
        kept = members[:4]
        judged |= dict.fromkeys(kept, (name, (1 if equal else len(members)) / len(kept)))
    return Split([one.id for one in log], judged)


def splits(traffic: Traffic, number: int, equal: bool = False) -> tuple[list[Split], list[Split]]:
    """Return so many splits of the planted home's own log, and as many logs of half of what was never logged."""
    rng = np.random.default_rng(2)
    own = [judging(traffic.logged, rng, equal) for _ in range(number)]
    half = len(traffic.fresh) // 2
    drawn = [[traffic.fresh[place] for place in rng.permutation(2 * half)[:half]] for _ in range(number)]
    return own, [judging(log, rng, equal) for log in drawn]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shift", "served_gain", "too_much"),
    [(0.0, 0.5, False), (0.0, 0.8, False), (0.4, 0.5, True)],
    ids=["as told", "known groups are served better", "the served draft promises too much"],
)
def test_both_kinds_of_logs_are_held_as_often_as_they_say(shift: float, served_gain: float, too_much: bool) -> None:
    traffic, scored = planted(shift, served_gain, steeper=0.05)
    found = figures(traffic, scored, *splits(traffic, 200), K)
    print(found["own"], found["logs"])
    for logs, num_requests in (("own", 300), ("logs", 150)):
        assert found[logs]["covered"] >= 0.93 * 200
        assert (found[logs]["splits"], found[logs]["requests"]) == (200, num_requests)
    assert (found["told"]["low"] > found["fresh"][SERVED]["value"]) == too_much


@pytest.mark.slow
@pytest.mark.parametrize("place", [0, 1], ids=["the home's own log", "logs drawn anew"])
def test_groups_that_weigh_the_same_however_often_they_are_asked_are_found_out_in_either_kind(place: int) -> None:
    traffic, scored = planted(steeper=0.1)
    both = list(splits(traffic, 100))
    good = figures(traffic, scored, *both, K)
    assert min(good["own"]["covered"], good["logs"]["covered"]) >= 93
    both[place] = splits(traffic, 100, equal=True)[place]
    found = figures(traffic, scored, *both, K)
    print(found["own"], found["logs"])
    assert found[("own", "logs")[place]]["too_low"] > 20


def planted_requests(number: int) -> list[Sample]:
    rng = np.random.default_rng(3)
    return [
        sample(f"f{n}", cluster=f"g{int(NUM_GROUPS * rng.random() ** 2)}")._replace(
            prompt_ids=rng.integers(5, 200, 30).tolist()
        )
        for n in range(number)
    ]


def test_a_log_is_a_half_and_each_of_its_groups_is_a_cluster_that_stands_for_its_requests_a_twentieth_at_most(
    tiny_target: Path,
) -> None:
    fresh = planted_requests(NUM_GROUPS * PER_GROUP)
    one, same, other = (draw_log(fresh, number, 0, 0.35, tiny_target) for number in (0, 0, 1))
    assert one == same != other
    assert len(set(one.log)) == len(fresh) // 2
    group_of = {sample.id: sample.cluster for sample in fresh}
    assert one.judged.keys() <= set(one.log)
    assert len({cluster for cluster, _ in one.judged.values()}) == len({group_of[id] for id in one.judged})
    sizes, told = Counter(group_of[id] for id in one.log), Counter[str]()
    for id, (_, weight) in one.judged.items():
        told[group_of[id]] += weight
    most = 0.05 * len(one.log)
    assert max(sizes[group] for group in told) > most > MOST_OF_GROUP
    assert told == pytest.approx({group: min(sizes[group], most) for group in told})


def test_the_same_requests_are_split_anew_under_another_secret(tiny_target: Path) -> None:
    log = planted_requests(150)
    one, same, other = (judged_by(log, name, 0.35, tiny_target) for name in ("a", "a", "b"))
    assert one == same
    assert one.log == other.log == [sample.id for sample in log]
    assert one.judged.keys() != other.judged.keys()


def test_of_the_homes_log_those_rows_are_split_that_a_refresh_would_take(tmp_path: Path) -> None:
    log = QueryLog(tmp_path / "queries.db")
    said = {"completion_ids": [1, 2, 3], "sampling": {"temperature": 0}}
    rows = [
        row(f"a{n}", "code").model_copy(update=said | {"group": f"{n % 3:064}", "prompt_ids": [n, 7]}) for n in range(9)
    ]
    log.append([row("other", "chat"), *rows, rows[0].model_copy(update={"id": "again"})])
    found = logged_samples(Refresh(min_rows=2, max_rows=8), log, ["code"])
    log.close()
    assert [one.id for one in found] == [f"a{n}" for n in range(2, 9)] + ["again"]
    assert [one.cluster for one in found] == [f"{n % 3:064}" for n in range(2, 9)] + [f"{0:064}"]


def test_a_log_without_a_conversation_to_be_judged_by_is_refused() -> None:
    traffic, scored = planted()
    own, drawn = splits(traffic, 1)
    for logs in ((own, [Split(["f0"], {})]), ([Split(["l0"], {})], drawn)):
        with pytest.raises(ValueError, match="1 of 1 logs have no conversation"):
            figures(traffic, scored, *logs, K)
