import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from models.core.evaluation.acceptance import AcceptanceCount
from models.core.evaluation.golden import (
    Answer,
    CanaryParams,
    Finding,
    Golden,
    equal_output,
    judge,
    load_golden,
    lost_on_canaries,
    lost_on_traffic,
    near_tie_threshold,
    save_golden,
)

REFERENCE = Golden(prompt_ids=(1,), token_ids=(5, 6, 7), gaps=(2.0, 0.01, float("inf")))
PARAMS, K = CanaryParams(), 3


@pytest.mark.parametrize(
    ("token_ids", "verdict"),
    [
        ((5, 6, 7), "equal"),
        ((5, 9, 9), "near-tie"),
        ((4, 6, 7), "different"),
        ((5, 6), "different"),
        ((5, 6, 7, 8), "different"),
    ],
)
def test_an_output_is_equal_near_a_tie_or_different(token_ids: tuple[int, ...], verdict: str) -> None:
    assert equal_output(REFERENCE, token_ids, threshold=0.05) == verdict


def test_a_gap_that_rounding_lifts_over_the_threshold_is_a_near_tie() -> None:
    golden = REFERENCE.model_copy(update={"gaps": (0.50000006, 0.5001, 2.0)})
    assert equal_output(golden, (4,), threshold=0.5) == "near-tie"
    assert equal_output(golden, (5, 9), threshold=0.5) == "different"


@pytest.mark.parametrize(
    ("token_ids", "gaps", "threshold"),
    [
        ((5, 6, 7), (2.0, 0.01, 5.0), 1e-3),  # no gap changed that has two ends
        ((5, 6, 7), (1.75, 0.02, 5.0), 0.375),
        ((5, 8, 7), (2.0, 0.03, 9.0), 0.06),  # it flipped by 0.04; what follows is of another text
        ((5, 6), (2.0, 0.05), 0.06),
    ],
)
def test_the_threshold_is_half_as_much_again_as_the_largest_change_of_a_gap_without_speculation(
    token_ids: tuple[int, ...], gaps: tuple[float, ...], threshold: float
) -> None:
    rerun = Golden(prompt_ids=(1,), token_ids=token_ids, gaps=gaps)
    assert near_tie_threshold([REFERENCE], [[REFERENCE], [rerun]]) == pytest.approx(threshold)


def test_the_threshold_of_a_few_prompts_holds_for_thousands() -> None:
    """What a batch adds to logits is simulated; that tokens flip at 0.375 and 0.5 is what was seen of 6,912 outputs."""
    draw = random.Random(0)

    def rerun(reference: Golden) -> Golden:
        margins = [gap + 0.125 * round(draw.gauss(0, 0.8)) for gap in reference.gaps]
        flipped = next((place for place, margin in enumerate(margins) if margin < 0), len(margins))
        token_ids = [*reference.token_ids[:flipped], *[-1] * (len(margins) - flipped)]
        return Golden(prompt_ids=(1,), token_ids=tuple(token_ids), gaps=tuple(map(abs, margins)))

    def outputs(count: int) -> list[Golden]:
        gaps = [tuple(0.125 * round(draw.expovariate(0.06)) for _ in range(40)) for _ in range(count)]
        return [Golden(prompt_ids=(1,), token_ids=tuple(range(40)), gaps=of_one) for of_one in gaps]

    golden, many = outputs(8), outputs(2000)
    threshold = near_tie_threshold(golden, [[rerun(one) for one in golden] for _ in range(3)])
    verdicts = Counter(equal_output(one, rerun(one).token_ids, threshold) for one in many)
    assert verdicts["near-tie"] > 100
    assert verdicts["different"] == 0
    assert threshold < 1  # and what is another text is told


def test_golden_outputs_survive_a_file_and_a_target_without_one_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no golden.json"):
        load_golden(tmp_path)
    save_golden(tmp_path, [REFERENCE], 0.05)
    assert load_golden(tmp_path) == ([REFERENCE], 0.05)


def answer(token_ids: list[int], accepted: list[int]) -> Answer:
    return Answer(tuple(token_ids), (K,) * len(accepted), tuple(accepted))


def tallies(accepted: int, num: int = 32, domain: str = "chat") -> list[AcceptanceCount]:
    return [AcceptanceCount(index, domain, steps=4, drafted=4 * K, accepted=4 * accepted) for index in range(num)]


def test_the_share_of_the_gain_that_is_missing_is_what_is_lost_up_to_where_outputs_part() -> None:
    then, now = answer([*range(121)], [2] * 40), answer([*range(121)], [1] * 60)
    assert lost_on_canaries([then], [now]) == pytest.approx(0.5)
    assert lost_on_canaries([now], [then]) == pytest.approx(-1)
    parted = answer([*range(100), *[0] * 21], [2] * 33 + [0] * 21)
    assert lost_on_canaries([then], [parted]) == lost_on_canaries([then], [then]) == 0


@pytest.mark.parametrize(
    ("then", "now"),
    [
        (answer([*range(40)], [2] * 13), answer([*range(40)], [1] * 20)),
        (answer([*range(40)], [0] * 39), answer([*range(40)], [0] * 39)),
        (answer([*range(121)], [2] * 40), Answer(tuple(range(121)), (0,) * 120, (0,) * 120)),
    ],
    ids=["few steps", "no gain then", "not drafted now"],
)
def test_where_there_is_nothing_to_compare_nothing_is_said(then: Answer, now: Answer) -> None:
    assert lost_on_canaries([then], [now]) is None


def test_traffic_is_held_against_what_its_domains_were_promised() -> None:
    promised = {"chat": 2.0, "code": 3.0}
    assert lost_on_traffic(promised, tallies(1), PARAMS) == 0
    assert lost_on_traffic(promised, tallies(1, domain="code"), PARAMS) == pytest.approx(0.5)
    assert lost_on_traffic(promised, tallies(1, domain="new"), PARAMS) == pytest.approx(0.5)
    assert lost_on_traffic(promised, [*tallies(0, 50), *tallies(1)], PARAMS) == 0  # only the last count
    assert lost_on_traffic(promised, tallies(0, 31), PARAMS) is None
    assert lost_on_traffic({}, tallies(0), PARAMS) is None


@pytest.mark.parametrize(
    ("canaries", "traffic", "finding"),
    [
        (0.0, 0.9, Finding.SOUND),
        (None, 0.9, Finding.SOUND),
        (0.9, 0.0, Finding.FELL),
        (0.9, None, Finding.FELL),
        (0.9, 0.9, Finding.PAIR),
    ],
)
def test_both_must_fall_for_a_broken_pair(canaries: float | None, traffic: float | None, finding: Finding) -> None:
    assert judge(canaries, traffic, PARAMS) is finding


class World:
    """Eight canary prompts of 96 tokens and traffic of one domain, with the demo's rates.

    A third of the outputs part at a near tie, after that the steps are fresh ones; of the other steps one in fifty has
    a drafted token flipped by the shape of the batch. Requests differ: their chance of acceptance is Beta distributed.
    """

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng = rng
        chances = rng.beta(8 * 0.45, 8 * 0.55, 20_000)
        self.promised = 1 + float(np.mean(chances + chances**2 + chances**3))
        self.reference = [answer(rng.integers(1, 9, 96).tolist(), self.steps(0.45)) for _ in range(8)]

    def steps(self, chance: float, num_tokens: int = 96) -> list[int]:
        accepted = np.cumprod(self.rng.random((num_tokens, K)) < chance, axis=1).sum(axis=1)
        emitted = np.cumsum(accepted + 1)
        return accepted[: int(np.searchsorted(emitted, num_tokens - 1)) + 1].tolist()

    def again(self, then: Answer, chance: float | None) -> Answer:
        """Return a prompt's answer now; with another chance if the draft no longer is what it was."""
        parts = int(self.rng.integers(96)) if self.rng.random() < 1 / 3 else 96
        token_ids = [*then.token_ids[:parts], *[0] * (96 - parts)]
        if chance is not None:
            return answer(token_ids, self.steps(chance))
        flipped = self.rng.random(len(then.accepted)) < 0.02
        return answer(token_ids, np.where(flipped, 0, then.accepted).tolist())

    def look(self, canaries: float | None, traffic: float) -> Finding:
        """Take one look, twice where the first sees a fall."""
        for _ in range(2):
            lost = lost_on_canaries(self.reference, [self.again(then, canaries) for then in self.reference])
            if judge(lost, None, PARAMS) is Finding.SOUND:
                return Finding.SOUND
        chances = self.rng.beta(8 * traffic, 8 * (1 - traffic), PARAMS.num_requests)
        steps = [self.steps(one, 60) for one in chances]
        counts = [AcceptanceCount(n, "chat", len(c), drafted=K * len(c), accepted=sum(c)) for n, c in enumerate(steps)]
        return judge(lost, lost_on_traffic({"chat": self.promised}, counts, PARAMS), PARAMS)


def simulate(canaries: float | None, traffic: float, num_looks: int, seed: int) -> dict[Finding, float]:
    world = World(np.random.default_rng(seed))
    found = [world.look(canaries, traffic) for _ in range(num_looks)]
    return {finding: found.count(finding) / num_looks for finding in Finding}


@pytest.mark.slow
def test_a_week_in_which_nothing_happens_or_traffic_drifts_raises_no_alarm() -> None:
    for seed, traffic in enumerate([0.45, 0.45, 0.1, 0.1]):
        shares = simulate(None, traffic, 1008, seed)  # a week of looks, one in ten minutes
        print(f"traffic at {traffic}: {shares}")
        assert shares[Finding.SOUND] == 1


def test_a_broken_pair_is_found_at_nearly_every_look_and_drift_never_taken_for_one() -> None:
    broken = simulate(0.15, 0.15, 100, seed=9)
    alone = simulate(0.15, 0.45, 100, seed=10)
    print(f"both fell: {broken}; canary prompts alone: {alone}")
    assert broken[Finding.PAIR] >= 0.95
    assert alone[Finding.PAIR] <= 0.05
