"""When a candidate draft may replace its parent."""

import numpy as np
import pytest

from models.gate import Params, Score, Verdict, allowed_error, decide

FAST = Params(num_resamples=200)


def scores(accepted: dict[str, list[float]], steps: int = 10) -> list[Score]:
    """Conversations of equal length: domain → accepted tokens of each."""
    return [
        Score(id=f"{domain}{i}", domain=domain, steps=steps, accepted=value)
        for domain, values in accepted.items()
        for i, value in enumerate(values)
    ]


def shifted(parent: list[Score], gains: dict[str, float]) -> list[Score]:
    """The same conversations with `gains[domain]` more tokens accepted a step."""
    return [s.model_copy(update={"accepted": s.accepted + s.steps * gains.get(s.domain, 0.0)}) for s in parent]


def noisy(parent: list[Score], gain: float, rng: np.random.Generator) -> list[Score]:
    """A candidate whose accepted tokens a step differ by `gain` on average, by chance in each conversation."""
    changes = rng.normal(gain, 0.15, len(parent))
    return [
        s.model_copy(update={"accepted": max(0.0, s.accepted + s.steps * float(change))})
        for s, change in zip(parent, changes, strict=True)
    ]


def population(rng: np.random.Generator, counts: dict[str, int]) -> list[Score]:
    """Conversations of different lengths, about 1.2 tokens accepted a step."""
    return [
        Score(id=f"{domain}{i}", domain=domain, steps=int(steps), accepted=float(steps * rng.uniform(0.7, 1.7)))
        for domain, count in counts.items()
        for i, steps in enumerate(rng.integers(10, 60, count))
    ]


def judge(parent: list[Score], candidate: list[Score], best: dict[str, float] | None = None, **kwargs) -> Verdict:
    return decide(parent, candidate, best or {}, kwargs.pop("params", FAST), kwargs.pop("test_index", 1), seed=0)


PARENT = scores({"chat": [10.0, 12.0] * 15, "code": [20.0, 22.0] * 15})


def test_a_gain_everywhere_is_promoted() -> None:
    verdict = judge(PARENT, shifted(PARENT, {"chat": 0.2, "code": 0.2}))
    assert verdict.promote
    assert verdict.reasons == ()


def test_the_figures_are_those_worked_out_by_hand() -> None:
    verdict = judge(PARENT, shifted(PARENT, {"chat": 0.4}), best={"chat": 2.2})
    # chat: τ 2.1 → 2.5 against a best of 2.2; code: τ 3.1, unchanged; together 1.6 → 1.8 accepted a step.
    assert verdict.overall.value == pytest.approx(0.2)
    assert verdict.domains["chat"].gain.value == pytest.approx(0.4)
    assert verdict.domains["chat"].best == pytest.approx(2.2)
    assert verdict.domains["chat"].relative.value == pytest.approx(2.5 / 2.2 - 1)
    assert verdict.domains["code"].best == pytest.approx(3.1)
    assert verdict.domains["code"].relative.value == pytest.approx(0.0)
    assert verdict.domains["code"].num_conversations == 30


def test_a_long_conversation_weighs_as_many_steps_as_it_has() -> None:
    parent = [
        Score(id="a", domain="chat", steps=30, accepted=30.0),
        Score(id="b", domain="chat", steps=10, accepted=30.0),
    ]
    candidate = [parent[0].model_copy(update={"accepted": 42.0}), parent[1]]
    assert judge(parent, candidate).overall.value == pytest.approx(12 / 40)


def test_the_bound_is_that_of_a_t_test_where_steps_are_equal() -> None:
    # With equal steps τ is a mean, and its one-sided 95% bound with 29 degrees of freedom is mean − 1.699 s / √30.
    gains = np.random.default_rng(0).normal(0.1, 0.2, 30)
    parent = scores({"chat": [15.0] * 30})
    candidate = scores({"chat": (15 + 10 * gains).tolist()})
    gain = judge(parent, candidate, params=Params(num_resamples=50_000)).domains["chat"].gain
    assert gain.low == pytest.approx(gains.mean() - 1.699 * gains.std(ddof=1) / 30**0.5, abs=2e-3)
    assert gain.high == pytest.approx(gains.mean() + 1.699 * gains.std(ddof=1) / 30**0.5, abs=2e-3)


def test_the_parent_itself_is_not_promoted() -> None:
    verdict = judge(PARENT, PARENT)
    assert not verdict.promote
    assert verdict.reasons == ("no gain shown: τ +0.0000, lower bound +0.0000",)


def test_the_order_of_conversations_makes_no_difference() -> None:
    candidate = noisy(PARENT, 0.05, np.random.default_rng(0))
    assert judge(PARENT, candidate) == judge(PARENT, candidate[::-1])


def test_a_domain_that_lost_is_refused_by_name() -> None:
    verdict = judge(PARENT, shifted(PARENT, {"chat": -0.2, "code": 0.6}))
    assert not verdict.promote
    assert verdict.overall.low > 0
    assert len(verdict.reasons) == 1
    assert 'domain "chat" may lose: τ -9.52% of 2.100' in verdict.reasons[0]


def test_a_domain_may_lose_less_than_the_floor() -> None:
    assert judge(PARENT, shifted(PARENT, {"chat": -0.05, "code": 0.6})).promote


def test_a_domain_whose_loss_is_uncertain_is_refused() -> None:
    swings = [15.0, -15.0] * 15
    parent = scores({"chat": [15.0] * 30, "code": [20.0] * 30})
    candidate = scores({"chat": [15.0 + swing for swing in swings], "code": [40.0] * 30})
    verdict = judge(parent, candidate)
    assert verdict.domains["chat"].relative.value == pytest.approx(0.0)
    assert not verdict.promote
    assert "chat" in verdict.reasons[0]


def test_floors_do_not_ratchet_down() -> None:
    # Each candidate gains on code and loses 4% on chat, under the floor of 5%, against the draft before it.
    parent, best, promoted = PARENT, {"chat": 2.1, "code": 3.1}, []
    for _ in range(3):
        candidate = shifted(parent, {"chat": -0.08, "code": 0.3})
        verdict = judge(parent, candidate, best)
        promoted.append(verdict.promote)
        assert judge(parent, candidate).promote, "without a best on record each step passes"
        best = {domain: judged.best for domain, judged in verdict.domains.items()}
        parent = candidate
    assert promoted == [True, False, False]


def test_too_few_conversations_of_a_domain_are_refused_by_name() -> None:
    parent = scores({"chat": [10.0] * 30, "code": [20.0] * 19})
    verdict = judge(parent, shifted(parent, {"chat": 0.5, "code": 0.5}))
    assert verdict.reasons == ('domain "code" has too few conversations: 19, wanted 20',)
    assert verdict.domains["code"].relative is None


def test_a_domain_with_a_best_but_no_conversations_is_not_judged() -> None:
    verdict = judge(PARENT, shifted(PARENT, {"chat": 0.5, "code": 0.5}), best={"math": 2.0})
    assert (verdict.promote, verdict.reasons, sorted(verdict.domains)) == (True, (), ["chat", "code"])


def test_drafts_without_a_difference_are_promoted_no_more_often_than_allowed() -> None:
    rng = np.random.default_rng(0)
    num_trials, allowed = 600, allowed_error(1, FAST.alpha_total)
    promoted = 0
    for seed in range(num_trials):
        parent = population(rng, {"chat": 30, "code": 30})
        promoted += decide(parent, noisy(parent, 0.0, rng), {}, FAST, test_index=1, seed=seed).promote
    assert promoted / num_trials <= allowed + 3 * (allowed * (1 - allowed) / num_trials) ** 0.5


def test_a_domain_that_loses_just_the_floor_passes_no_more_often_than_allowed() -> None:
    rng = np.random.default_rng(1)
    num_trials, passed = 400, 0
    for seed in range(num_trials):
        parent = population(rng, {"chat": 30})
        tau = 1 + sum(s.accepted for s in parent) / sum(s.steps for s in parent)
        verdict = decide(parent, noisy(parent, -FAST.floor * tau, rng), {}, FAST, test_index=1, seed=seed)
        passed += verdict.domains["chat"].relative.low >= -FAST.floor
    assert passed / num_trials <= 0.05 + 3 * (0.05 * 0.95 / num_trials) ** 0.5


def test_a_real_gain_is_found() -> None:
    rng = np.random.default_rng(2)
    parents = [population(rng, {"chat": 40, "code": 40}) for _ in range(50)]
    promoted = sum(judge(parent, noisy(parent, 0.12, rng)).promote for parent in parents)
    assert promoted >= 48


def test_all_tests_of_a_line_together_spend_one_budget() -> None:
    spent = sum(allowed_error(k, 0.05) for k in range(1, 20_000))
    assert 0.0499 < spent < 0.05
    assert allowed_error(1, 0.05) == pytest.approx(0.0304, abs=1e-4)


def test_a_later_test_asks_for_more() -> None:
    candidate = noisy(PARENT, 0.05, np.random.default_rng(3))
    first, tenth = judge(PARENT, candidate), judge(PARENT, candidate, test_index=10)
    assert first.promote
    assert not tenth.promote
    assert tenth.overall.value == first.overall.value
    assert tenth.overall.low < 0 < first.overall.low


def test_lists_that_do_not_match_are_refused() -> None:
    with pytest.raises(ValueError, match="unmatched: code29"):
        judge(PARENT, PARENT[:-1])
    with pytest.raises(ValueError, match='"code29" has domains "code" and "chat"'):
        judge(PARENT, [*PARENT[:-1], PARENT[-1].model_copy(update={"domain": "chat"})])
    with pytest.raises(ValueError, match="each id once"):
        judge([*PARENT, PARENT[0]], [*PARENT, PARENT[0]])
    with pytest.raises(ValueError, match="at least one conversation"):
        judge([], [])


@pytest.mark.parametrize("accepted", [float("nan"), float("inf"), -1.0])
def test_a_score_that_is_no_number_of_tokens_is_refused(accepted: float) -> None:
    with pytest.raises(ValueError, match="accepted"):
        Score(id="a", domain="chat", steps=10, accepted=accepted)


@pytest.mark.parametrize("tau", [float("nan"), float("inf"), 0.9])
def test_a_best_that_is_no_tau_is_refused(tau: float) -> None:
    with pytest.raises(ValueError, match='best of domain "chat"'):
        judge(PARENT, PARENT, best={"chat": tau})


def test_tests_count_from_one() -> None:
    with pytest.raises(ValueError, match="test_index counts from 1, got 0"):
        judge(PARENT, PARENT, test_index=0)
