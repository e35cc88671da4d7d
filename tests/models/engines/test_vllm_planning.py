"""The planner: what it is told decides what it plans, without an engine."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import cast

import numpy as np
import pytest

from models.core.layers import quantized_weights
from models.core.throughput.cost import Cost, Time
from models.core.throughput.running import Acceptance, DomainShare
from models.engines import LookUp
from models.engines.vllm.fields import MEASURE, NOTHING, OPTIONS, Choice, DraftOptions, Passes, Row, Setup, StepPlan
from models.engines.vllm.measuring import measured_for
from models.engines.vllm.planning import (
    EVERY,
    NUM_CYCLES,
    NUMS,
    MeasuredStep,
    MeasurementOverhead,
    Planner,
    RequestState,
    Step,
    _chances,
    cycles,
    turns,
)
from models.engines.vllm.scheduler import _parts
from models.lengths import Plan, SequenceState, fixed, goodput
from models.params import BaseParams

K = 3
LOOKED_UP = 8
DRAFTED = Row(0, 0, False, [1] * K)


def setup(lengths: BaseParams | None = None, costs: Path | None = None, facts: str = "here") -> Setup:
    return Setup(K, LookUp(num_tokens=LOOKED_UP), lengths or goodput.Params(), costs, facts)


def asked(*draft_options: DraftOptions) -> list[RequestState]:
    return [RequestState(wish, whole=True, name=str(place)) for place, wish in enumerate(draft_options)]


AUTO = DraftOptions("auto", "code", "alice")


def step(num: int, num_rows: int, ms: float) -> Step:
    return Step(num, num_rows, ms, {"code": DomainShare(num, num, 0)})


def measure(planner: Planner, row_ms: float, pass_ms: float, slower: float = 1.0, sequence_ms: float = 0.0) -> None:
    """Show it the steps that an engine is measured by: 10 ms, and so much for each more row and each pass.

    A pass takes `sequence_ms` more for each sequence after the first. In the second round all takes `slower` times as
    long.
    """

    def ms(factor: float, num: int, more: int, passes: int) -> float:
        return factor * (10 + row_ms * more + (pass_ms + sequence_ms * (num - 1)) * passes)

    for factor, num in product((1.0, slower), (1, 4)):
        measured_steps(planner, num, partial(ms, factor))
    planner.next(asked(AUTO))
    planner.took(step(1, 1, 10), [NOTHING])


def measured(row_ms: float = 0.2, pass_ms: float = 0.5, **more: float) -> Planner:
    """Return a planner that was shown such steps."""
    planner = Planner(setup())
    measure(planner, row_ms, pass_ms, **more)
    return planner


def measured_steps(planner: Planner, num: int, ms: Callable[[int, int, int], float]) -> None:
    """Show it steps of so many sequences; `ms` says what they take by their number, rows beyond it and passes."""
    more = 0
    for _ in range(5 * len(turns(num, LOOKED_UP))):
        drafting = planner.next(asked(*[DraftOptions(MEASURE, str(num))] * num))
        planner.took(step(num, num + more, ms(num, more, drafting.num_passes)), [NOTHING] * num)
        more = drafting.num_filled * drafting.num_looked_up


def settled(planner: Planner, accepted: int, steps: int = 400) -> Plan:
    """Serve a sequence of whose drafted tokens `accepted` are accepted; return the last plan that does not explore."""
    last = Plan(0)
    for _ in range(steps):
        step = planner.next(asked(AUTO))
        drafted = step.plan.num_kept("code", "head") if step.num_passes else 0
        row = Row(0, 0, False, [1] * drafted)
        planner.looked_up(AUTO, row)
        planner.verified(AUTO, row, min(accepted, drafted), whole=True)
        if step.plan.why != "explores":
            last = step.plan
    return last


@pytest.mark.parametrize(
    ("row_ms", "pass_ms", "accepted", "pays"), [(0.2, 0.5, K, K), (0.2, 0.5, 0, 0), (12.0, 4.0, 1, 0)]
)
def test_it_drafts_where_rows_are_cheap_and_the_draft_is_good(
    row_ms: float, pass_ms: float, accepted: int, pays: int
) -> None:
    assert settled(measured(row_ms, pass_ms), accepted).num_passes == pays


def test_a_draft_that_says_all_in_one_pass_is_measured_and_planned_by_one() -> None:
    """A step with K tokens takes as long as one of K passes would, so a pass is all of it."""
    planner = Planner(replace(setup(), one_pass=True))
    measured_steps(planner, 1, lambda _, more, passes: 10 + 0.1 * more + 1.5 * (passes > 0))
    planner.next(asked(AUTO))
    planner.took(step(1, 1, 11.5), [NOTHING])
    known = planner._costs["greedy"]
    assert [known.step_ms(1, 1, num) for num in (0, 1, K)] == pytest.approx([10.0, 11.5, 11.5], rel=0.01)
    assert settled(planner, accepted=K).num_passes == K


def test_a_sequence_that_is_drafted_by_the_head_alone_gets_every_pass_and_the_others_what_pays() -> None:
    planner = measured()
    settled(planner, accepted=0)
    step = planner.next(asked(AUTO, DraftOptions("head", "code")))
    assert step.num_passes == K
    assert not step.rests
    assert [planner.num_kept(wish, whole=True) for wish in (HEAD, DraftOptions("off"))] == [K, 0]


HEAD = DraftOptions("head", "code")


def test_where_the_draft_rests_passes_are_made_over_what_is_drafted_by_the_head_alone() -> None:
    planner = measured(row_ms=0.2, pass_ms=0.5, sequence_ms=0.3)
    settled(planner, accepted=0)
    step = planner.next(asked(AUTO, HEAD, AUTO, AUTO))
    assert step.plan.skip
    assert step.passes == (Passes(K, frozenset("1")),)
    assert [step.drafts(name) for name in "0123"] == [False, True, False, False]


def test_where_fewer_tokens_pay_the_others_get_their_own_passes_if_that_is_faster() -> None:
    """A pass takes 0.5 ms and 2 for each sequence after the first, or 2 and nothing: then once over all is faster."""
    for sequence_ms, pass_ms, apart in ((2.0, 0.5, True), (0.0, 2.0, False)):
        planner = measured(row_ms=0.01, pass_ms=pass_ms, sequence_ms=sequence_ms)
        planner._policy = SimpleNamespace(plan=lambda *_: Plan(1, settled=1))
        step = planner.next(asked(AUTO, AUTO, HEAD, AUTO))
        wanted = (Passes(K, frozenset("2")), Passes(1, frozenset("013"))) if apart else (Passes(K),)
        assert step.passes == wanted
        assert all(map(step.drafts, "0123"))


def test_what_has_come_to_the_end_of_the_drafts_context_is_in_no_pass_and_stops_none() -> None:
    planner = measured(row_ms=0.01, pass_ms=0.1)
    seen: list[int] = []
    planner._policy = SimpleNamespace(plan=lambda *of: seen.append(len(of[2])) or Plan(2, settled=2))
    for others in ([AUTO, AUTO], [HEAD, HEAD], [AUTO, HEAD]):
        running = asked(*others, AUTO, HEAD, DraftOptions("off"))
        step = planner.next([one if number < 2 else replace(one, fits=False) for number, one in enumerate(running)])
        assert [step.drafts(name) for name in "01234"] == [True, True, False, False, False]
        assert step.num_passes == (K if HEAD in others else 2)
    step = planner.next([replace(one, fits=False) for one in asked(AUTO, HEAD)])  # look-up may go on
    assert (step.rests, step.num_looked_up > 0, seen) == (True, True, [2, 1, 1, 1])


def test_what_is_tried_at_rest_is_tried_on_sequences_with_whole_keys() -> None:
    planner = measured(row_ms=0.2, pass_ms=0.5, sequence_ms=0.3)
    plan = Plan(2, longest={("code", "head", 0): 2, ("code", "head", 1): 0}, why="explores")
    planner._policy = SimpleNamespace(plan=lambda *_: plan)
    running = [one if number == 3 else replace(one, whole=False) for number, one in enumerate(asked(*[AUTO] * 4))]
    assert planner.next(running).passes == (Passes(2, frozenset("3")),)


def test_passes_over_some_sequences_teach_what_those_take_and_two_kinds_in_a_step_teach_nothing() -> None:
    planner = measured(row_ms=0.2, pass_ms=0.5, sequence_ms=0.9)
    planner._policy = SimpleNamespace(plan=lambda *_: Plan(0, skip=True))

    def passes_ms() -> list[float]:
        known = [planner._costs["greedy"].pass_ms(num) for num in (1, 4)]
        plain = planner._costs["greedy"].step_ms(4, 4, 0)
        return [10 * (ms or 0.0) / plain for ms in known]

    before = passes_ms()
    drafted = [DRAFTED, NOTHING, NOTHING, NOTHING]
    for number in range(600):  # plain steps between them tell that the machine is no slower
        planner.next(asked(HEAD if number % 2 else AUTO, AUTO, AUTO, AUTO))
        planner.took(step(4, 4, 13.0 if number % 2 else 10.0), drafted if number % 2 else None)
    one, four = passes_ms()
    assert one > 1.5 * before[0]  # in truth 1 ms
    assert four == pytest.approx(before[1], rel=0.2)
    known = planner._costs["greedy"]
    planner._policy = SimpleNamespace(plan=lambda *_: Plan(1, settled=1))
    assert len(planner.next(asked(HEAD, AUTO, AUTO, AUTO)).passes) == 2
    planner.took(step(4, 10, 500.0), [DRAFTED] * 4)
    assert planner._costs["greedy"] == known


def test_what_judging_costs_is_reckoned_anew_where_another_draft_was_swapped_in() -> None:
    planner = measured()
    for num_swaps, promised in ((1, 3.9), (2, 1.0)):
        planner.next(asked(AUTO._replace(num_swaps=num_swaps, promised=promised)))
        assert (planner.throughput.overhead_of(1) > 0) == (promised == 1.0)  # the better draft drafts K for all


def test_the_policy_is_told_how_many_prompt_tokens_come_with_an_emitted_one() -> None:
    planner, seen = measured(), []
    planner._policy = SimpleNamespace(plan=lambda cost, *_: seen.append(cost.prompt_tokens) or Plan(0))
    for number in range(1000):
        planner.next([replace(one, num_read=60 * (number % 4 == 0)) for one in asked(AUTO, AUTO)])
        for _ in range(2):
            planner.verified(AUTO, DRAFTED, 2, whole=True)
    assert seen[-1] == pytest.approx(2 * 15 / 6, rel=0.1)


def calls_of(planner: Planner) -> list[Plan | None]:
    """Return a list to which each plan adds the one before it."""
    calls: list[Plan | None] = []
    plan = planner._policy.plan
    planner._policy = SimpleNamespace(plan=lambda *of: calls.append(of[4]) or plan(*of))
    return calls


def test_at_rest_a_plan_is_followed_for_some_steps_which_are_counted_and_one_of_them_tells_what_they_take() -> None:
    planner = measured()
    settled(planner, accepted=0)
    planner.next(running := [replace(one, whole=False) for one in asked(AUTO)])
    calls, told, lookups = calls_of(planner), planner._costs["greedy"].num_steps, 0
    for _ in range(400):
        lookups += planner.next([*running]).num_looked_up > 0
        planner.took(step(1, 1, 20.0), None)
    assert 50 <= len(calls) <= 51
    assert 50 <= lookups <= 51
    assert sum(before.followed for before in calls if before is not None) == pytest.approx(400, abs=8)
    assert 50 <= planner._costs["greedy"].num_steps - told <= 51
    assert planner._costs["greedy"].step_ms(1, 1, 0) == pytest.approx(20.0, rel=0.05)  # it has become slower
    assert planner.speeds.of("code") is not None


def test_what_changes_is_planned_for_at_once() -> None:
    planner = measured()
    settled(planner, accepted=0)
    calls, (one,) = calls_of(planner), asked(AUTO)
    reads = replace(one, num_read=5)
    for running in ([one, replace(one, name="1")], [reads], [reads], [one], [replace(one, whole=False)]):
        num = len(calls)
        planner.next(running)
        assert len(calls) == num + 1


def test_while_speculation_is_off_nothing_is_planned_until_other_sequences_run() -> None:
    planner = measured()
    settled(planner, accepted=K)
    calls = calls_of(planner)
    for num in (1, 2):
        for _ in range(100):
            step_plan = planner.next(asked(*[AUTO] * num), is_off=len(calls) > 0 or num == 2)
            planner.took(step(num, num, 10.0), None)
        assert len(calls) == num
    assert (step_plan.plan.settled, step_plan.rests) == (K, False)  # it is followed as soon as it is on
    planner.next(asked(AUTO, AUTO))
    assert len(calls) == 3


def test_the_policy_fixed_looks_up_whatever_is_found_and_drafts_k_tokens() -> None:
    step = Planner(setup(fixed.Params())).next(asked(AUTO))
    assert (step.num_passes, step.num_looked_up) == (K, LOOKED_UP)
    assert step.plan.num_kept("code", "lookup", 5) >= LOOKED_UP
    assert step.plan.num_kept("code", "head") == K


def test_another_promise_is_another_draft_and_starts_its_estimate_anew() -> None:
    planner = measured()
    settled(planner, accepted=0)
    planner.next(asked(AUTO._replace(promised=3.5, num_swaps=1)))
    assert planner._acceptance.expected("code", "head", K) > 2


def test_requests_asked_before_a_swap_bring_the_draft_before_not_back() -> None:
    """Both kinds run side by side until the older ones have ended; each step used to start the estimate anew."""
    planner = measured()
    before, after = AUTO._replace(promised=1.5), AUTO._replace(promised=3.5, num_swaps=1)
    planner.next(asked(before))
    planner.next(asked(before, after))
    for _ in range(300):
        planner.verified(after, DRAFTED, 0, whole=True)
        planner.next(asked(before, after))
    assert planner._acceptance.num_swaps == 1
    assert planner._acceptance.expected("code", "head", K) < 0.1


def test_a_domain_that_asks_later_brings_its_promise_and_changes_no_other() -> None:
    planner = measured()
    settled(planner, accepted=0, steps=4000)
    known = planner._acceptance.chances("code", "head", 1)
    planner.next(asked(DraftOptions("auto", "chat", "alice", promised=3.5)))
    assert planner._acceptance.chances("code", "head", 1) == pytest.approx(known, abs=0.05)
    assert planner._acceptance.num_swaps == 0
    assert planner._acceptance.expected("chat", "head", K) > 2


@pytest.mark.parametrize("choice", ["sampled", "logprobs"])
def test_steps_that_choose_tokens_otherwise_have_a_table_of_their_own(choice: Choice) -> None:
    """It starts as the greedy one; here a row takes ten times as long."""
    planner, sampled = measured(), [RequestState(AUTO, whole=True, choice=choice)]
    for number in range(1000):
        planner.next(sampled)
        rows = 1 + 3 * (number % 2)
        planner.took(step(1, rows, 10 + 2.0 * (rows - 1)), None)
    greedy, other = (planner._costs[kind].step_ms(1, 4, 0) for kind in ("greedy", choice))
    plain = planner._costs[choice].step_ms(1, 1, 0)
    assert greedy == pytest.approx(10.6, rel=0.1)
    assert other / plain == pytest.approx(1.6, rel=0.1)


def test_a_measurement_beside_other_work_is_used_but_not_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "costs.json"
    noisy = Planner(setup(costs=file))
    for slower in (1.0, 1.4):  # but for steps of one row
        measured_steps(noisy, 4, lambda num, more, passes: (10 + 0.2 * more) * (slower if more else 1) + passes)  # noqa: B023
    noisy._take(noisy._measured)
    assert not file.exists()
    assert "varied by 13%" in caplog.text
    assert noisy._costs["greedy"].line(1) is not None
    measure(Planner(setup(costs=file)), row_ms=0.2, pass_ms=0.5, slower=1.4)  # the machine became slower meanwhile
    assert file.exists()


def test_speeds_are_told_by_domain_as_measured() -> None:
    planner = measured()
    for _ in range(300):
        planner.next(asked(AUTO, AUTO._replace(domain="chat")))
        parts = {"code": DomainShare(1, 3, 2), "chat": DomainShare(1, 1, 0)}
        planner.took(Step(2, 8, 14.0, parts), [DRAFTED] * 2)
    code, chat = planner.speeds.of("code"), planner.speeds.of("chat")
    assert chat.tokens_per_s == pytest.approx(1000 / 14)
    assert code.tokens_per_s == pytest.approx(3000 / 14, rel=0.01)
    assert chat.plain_tokens_per_s == pytest.approx(100, rel=0.3)
    assert planner.speeds.of("math") is None
    planner.next(asked(AUTO))
    planner.took(Step(1, 4, 3000.0, {"code": DomainShare(1, 1, 0)}), [DRAFTED])  # a draft was swapped in
    after = planner.speeds.of("code")
    assert after.tokens_per_s == pytest.approx(code.tokens_per_s, rel=0.02)


def test_what_a_draft_that_was_swapped_out_gave_is_told_no_more() -> None:
    planner = measured()
    for num_swaps, tokens in ((0, 1), (1, 3)):
        for _ in range(300):
            planner.next(asked(AUTO._replace(num_swaps=num_swaps)))
            planner.took(Step(1, 4, 12.1, {"code": DomainShare(1, tokens, tokens - 1)}), [DRAFTED])
        speed = planner.speeds.of("code")
        assert speed.tokens_per_s == pytest.approx(1000 * tokens / 12.1, rel=0.02)


def test_requests_that_judge_the_draft_are_no_speed_of_what_is_fastest() -> None:
    """Some requests, a domain's first too, are drafted by the head alone, K tokens a step, whether that pays or not."""

    def request(drafting: str, emitted: int) -> SimpleNamespace:
        params = SimpleNamespace(extra_args={OPTIONS: DraftOptions(drafting, "code")})
        return SimpleNamespace(sampling_params=params, num_output_tokens=7 + emitted)

    asked = (("auto", 3), ("head", 4), ("off", 1), ("auto", 1))
    seen = {str(number): (request(*one), 7) for number, one in enumerate(asked)}
    assert _parts(seen, {"0", "1"}) == {"code": DomainShare(2, 4, 2, 1)}


def test_the_reading_of_prompts_is_no_row_and_counts_with_a_draft_and_without() -> None:
    """A prompt takes 100 ms and the draft 1.5 more; then 20 steps of 12.1 ms give 2 tokens each, plain ones take 10."""
    planner = measured()
    before = planner._costs["greedy"].step_ms(1, 1, 0)
    planner._policy = SimpleNamespace(plan=lambda *_: Plan(K, settled=K))
    drafted = [DRAFTED]
    for _ in range(40):
        planner.next([replace(one, num_read=50) for one in asked(AUTO)])
        planner.took(Step(1, 0, 101.5, {"code": DomainShare(1, 1, 0)}, num_read=50, num_reading=1), drafted)
        for _ in range(20):
            planner.next(asked(AUTO))
            planner.took(Step(1, 4, 12.1, {"code": DomainShare(1, 2, 1)}), drafted)
    speed = planner.speeds.of("code")
    assert planner._costs["greedy"].step_ms(1, 1, 0) == pytest.approx(before, rel=0.02)
    assert speed.tokens_per_s / speed.plain_tokens_per_s == pytest.approx((100 + 400) / (101.5 + 242), rel=0.02)


@pytest.mark.parametrize(("pass_ms", "chance"), [(0.5, 0.0), (3.0, 0.3), (1.0, 0.5), (0.2, 0.8)])
def test_where_it_says_that_drafting_costs_nothing_is_drafted(pass_ms: float, chance: float) -> None:
    """A draft of which 2.5 was promised serves; a step takes 10 ms, 1.5 for each row more and so much a pass."""
    rng, planner = np.random.default_rng(0), measured(row_ms=1.5, pass_ms=pass_ms)
    draft_options, rows, told = AUTO._replace(promised=2.5, num_swaps=1), 1, []
    for number in range(2500):
        drafting = planner.next(asked(draft_options))
        drafted = drafting.plan.num_kept("code", "head") if drafting.num_passes else 0
        row = Row(0, 0, False, [1] * drafted)
        ms = (10 + 1.5 * (rows - 1) + pass_ms * drafting.num_passes) * np.exp(0.05 * rng.standard_normal())
        accepted = int(np.cumprod(rng.random(rows - 1) < chance).sum())
        planner.verified(draft_options, Row(0, 0, False, [1] * (rows - 1)), accepted, whole=True)
        planner.took(
            Step(1, rows, ms, {"code": DomainShare(1, 1 + accepted, accepted)}), [row] if drafting.passes else None
        )
        rows = 1 + drafted
        if number >= 1000 and (speed := planner.speeds.of("code")) is not None and speed.high < 1:
            told.append(drafting.plan.settled)
    assert not any(told)
    emitted = [1 + sum(chance**place for place in range(1, num + 1)) for num in range(K + 1)]
    best = max(range(K + 1), key=lambda num: emitted[num] / (10 + (1.5 + pass_ms) * num))
    assert (planner.plan is not None and planner.plan.settled > 0) == (best > 0)


def test_a_step_with_speculation_off_is_no_speed_of_a_draft() -> None:
    planner = measured()
    planner.speeds = type(planner.speeds)()
    planner.next(asked(AUTO))
    planner.took(step(1, 1, 10.0), None)
    assert planner.speeds.of("code") is None


@pytest.mark.parametrize("tau", [1.0, 1.05, 1.7, 3.0, 4.0])
def test_a_promised_length_is_the_sum_of_its_shares(tau: float) -> None:
    shares = _chances(tau, K)
    assert 1 + sum(shares) == pytest.approx(tau, abs=1e-6)
    assert sorted(shares, reverse=True) == shares


def test_what_steps_take_is_kept_for_the_next_start_on_this_machine_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "costs" / "here.json"
    first = setup(costs=file)
    assert first.known_cost() is None
    measure(Planner(first), row_ms=0.2, pass_ms=0.5)
    known = first.known_cost()
    assert known.step_ms(4, 4, 0) == pytest.approx(10, rel=0.2)
    assert setup(costs=file, facts="another machine").known_cost() is None
    assert "was measured for here, wanted another machine" in caplog.text
    file.write_text(file.read_text()[:50])
    assert first.known_cost() is None


def test_steps_of_a_group_that_is_not_whole_are_not_measured() -> None:
    planner = Planner(setup())
    for num in (3, 4):
        planner.next(asked(*[DraftOptions(MEASURE, "4")] * num))
        planner.took(step(num, num, 10), [NOTHING] * num)
    assert [time.num_sequences for time in planner._measured] == [4]


def test_a_step_that_verifies_what_fewer_sequences_were_given_is_not_measured() -> None:
    """Each step's rows are those of four sequences and of what three of them were given in the one before."""
    planner, rows = Planner(setup()), []
    for _ in turns(4, LOOKED_UP):
        before = planner.drafting
        planner.next(asked(*[DraftOptions(MEASURE, "4")] * 4))
        planner.took(step(4, 4 + min(before.num_filled, 3) * before.num_looked_up, 10), [NOTHING] * 4)
        rows = [time.num_rows for time in planner._measured]
    assert rows == [4, 4, 5]


@pytest.mark.parametrize("num", [1, 64])
def test_all_kinds_of_steps_take_turns_so_that_a_slow_minute_changes_no_ratio(num: int) -> None:
    """The machine gets slower from step to step, by half in all; a row takes a tenth of the step, a pass a fifth."""
    planner, slower = Planner(setup()), iter(np.linspace(1, 1.5, 100))
    for _ in range(2):
        measured_steps(planner, num, lambda num, more, passes: next(slower) * (10 + more / num + 2 * passes))
    planner._take(planner._measured)
    known = planner._costs["greedy"]
    plain, row, passes = (known.step_ms(num, rows, passes) for rows, passes in ((num, 0), (2 * num, 0), (num, K)))
    assert [(row or 0) / plain, (passes or 0) / plain] == pytest.approx([1.1, 1.6], rel=0.03)


@pytest.mark.parametrize(
    ("num", "rows"),
    [(1, (1, 2, 3, 4, 5, 9)), (2, (1, 2, 3, 4, 5, 9)), (4, (1, 1.25, 2, 9)), (16, (1, 1.25, 2, 9)), (48, (1, 1.25, 2))],
)
def test_the_first_rows_beyond_one_a_sequence_are_measured_for_themselves(num: int, rows: tuple[float, ...]) -> None:
    planner = Planner(setup())
    measured_steps(planner, num, lambda num, more, passes: 10 + 3 * (more > 0) + 0.1 * more + 2 * passes)
    planner._take(planner._measured)
    (curve,) = planner._costs["greedy"].curves
    assert curve.rows == rows
    assert curve.points == pytest.approx([10 + 3 * (more > 1) + 0.1 * num * (more - 1) for more in curve.rows])
    assert curve.draft == pytest.approx(2.0)


def test_rows_and_wishes_travel_as_lists_and_without_a_wish_a_request_is_drafted_by_the_head() -> None:
    for row in (Row(5, 8, True, [3, 1, 4]), Row(2, 6, False, [7]), NOTHING, Row(0, 0, False, [7, 9], 3, (0.5, 0.25))):
        assert Row.unpacked(row.packed()) == row
    params = SimpleNamespace(extra_args={OPTIONS: ["auto", "code", "alice", 1.5]})
    assert DraftOptions.of(params) == DraftOptions("auto", "code", "alice", 1.5)
    assert DraftOptions.of(object()) == DraftOptions("head")


def test_a_chain_that_ended_by_itself_is_told_from_one_that_was_cut() -> None:
    ended = NOTHING.of_head([7, 9, -1], 3, [0.5, 0.1, 1.0])
    assert ended == Row(0, 0, False, [7, 9], 3, [0.5, 0.1])
    assert ended.cut(2) == ended.cut(3) == ended
    assert ended.cut(1) == ended._replace(token_ids=[7], num_wanted=1)
    assert NOTHING.of_head([7, 9, 4], 2, ()) == Row(0, 0, False, [7, 9], 2)


@pytest.mark.parametrize(
    ("passes", "captures", "rests", "is_plain"),
    [
        ((), False, True, True),
        ((), True, True, False),
        ((Passes(K, frozenset("1")),), False, False, False),
        ((Passes(0),), False, False, False),
    ],
)
def test_a_step_rests_only_if_no_pass_is_made_and_is_a_plain_one_unless_states_are_captured(
    passes: tuple[Passes, ...], captures: bool, rests: bool, is_plain: bool
) -> None:
    step = StepPlan(Plan(0, skip=True), passes, 8, captures=captures)
    assert (step.rests, step.is_plain) == (rests, is_plain)


@pytest.mark.parametrize("capture", ["", "states"])
def test_where_nothing_is_drafted_by_a_head_the_draft_rests(capture: str) -> None:
    planner = Planner(setup())
    step = planner.next(asked(DraftOptions("off"), DraftOptions("off", capture=capture)))
    assert (step.rests, step.captures) == (True, bool(capture))
    assert planner.drafting == step


def test_a_table_is_told_apart_by_shapes_and_mode(tmp_path: Path) -> None:
    for name in ("target", "draft"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(f'{{"name": "{name}"}}')
    told = [measured_for(tmp_path / "target", tmp_path / "draft", "bfloat16", eager, "1") for eager in (True, False)]
    assert told[0] != told[1]
    assert "cores" in told[0]
    (tmp_path / "target" / quantized_weights.FILE).touch()
    assert measured_for(tmp_path / "target", tmp_path / "draft", "bfloat16", True, "1") != told[0]


def test_a_measurement_that_broke_off_at_once_is_no_table() -> None:
    planner = Planner(setup())
    planner.next(asked(DraftOptions(MEASURE, "1")))  # a step with passes
    planner.took(step(1, 1, 12), [NOTHING])
    planner.next(asked(AUTO))
    planner.took(step(1, 1, 10), [NOTHING])
    assert planner._costs["greedy"].grows


def test_a_table_that_can_not_be_written_costs_the_next_start_and_no_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "full").touch()  # no folder can be made in its place
    planner = Planner(setup(costs=tmp_path / "full" / "here.json"))
    measure(planner, row_ms=0.2, pass_ms=0.5)
    assert settled(planner, accepted=K).num_passes == K
    assert "the table of costs was not written" in caplog.text


@pytest.mark.parametrize(("most", "wanted"), [(3, [1, 2, 3]), (48, [1, 2, 4, 8, 16, 32, 48]), (500, [*NUM_CYCLES])])
def test_it_is_measured_with_as_many_sequences_as_the_engine_runs(most: int, wanted: list[int]) -> None:
    assert [*cycles(most)] == wanted


def test_what_is_drafted_in_a_step_is_verified_in_the_next_so_that_each_kind_of_step_is_timed_once_a_cycle() -> None:
    """Rows of a step are its sequences and what the step before drafted; passes are its own."""
    kinds = turns(16, 8)
    assert kinds == [
        MeasuredStep(passes=True),
        MeasuredStep(False, 4, 1),
        MeasuredStep(False, 16, 1),
        MeasuredStep(False, 16, 8),
        MeasuredStep(),
    ]
    steps = [(16 + last.num_filled * last.num_tokens, one.passes) for last, one in pairwise([kinds[-1], *kinds])]
    assert steps == [(16, True), (16, False), (20, False), (32, False), (144, False)]


PASSES, PLAIN = MeasuredStep(passes=True), MeasuredStep()


def test_with_few_sequences_or_no_look_up_there_are_fewer_kinds() -> None:
    assert turns(1, 0) == [PASSES, MeasuredStep(False, 1, 1), PLAIN]
    assert turns(64, 8) == [PASSES, MeasuredStep(False, 16, 1), MeasuredStep(False, 64, 1), PLAIN]


RUNNING = [SequenceState("code")]


def cost() -> Cost:
    """A step takes 10 ms, a row beyond one a sequence 0.2, a pass 0.5 for each sequence."""
    times = [
        Time(num, num + more, passes, 10 + 0.2 * more + 0.5 * num * passes)
        for num in (1, 8, 64)
        for more, passes in ((0, 0), (0, K), (num, 0), (3 * num, 0))
    ]
    return Cost.measured(times * 4, "here")


def judging(plan: Plan) -> MeasurementOverhead:
    return MeasurementOverhead(cast("ModuleType", SimpleNamespace(plan=lambda *_: plan)), goodput.Params(), K)


def accepted() -> Acceptance:
    acceptance = Acceptance()
    acceptance.promise("code", [0.2, 0.06, 0.04])
    return acceptance


@pytest.mark.parametrize(
    ("settles", "lost"),
    [
        (0, (3 * 0.5 + 3 * 0.2 - 0.3) / 10),  # what it takes, at a token a ms, less what it brings
        (1, (3 * 0.5 + 2 * 0.2 - 0.1) / 14),  # three passes over it take less than two more over all
        (3, 0.0),
    ],
)
def test_what_is_lost_for_eight_is_known_while_one_runs(settles: int, lost: float) -> None:
    judged = judging(Plan(settles, settled=settles, tokens_per_s=1000.0))
    judged.step(cost(), accepted(), RUNNING)
    assert judged.lost[NUMS.index(8)] == pytest.approx(lost, abs=0.01)


def test_prompts_that_the_draft_reads_only_to_be_judged_are_part_of_it() -> None:
    """Where it drafts for others it reads them in any case."""
    few, many = cost(), replace(cost(), prompt_tokens=60.0)
    for settles, dearer in ((0, True), (1, False)):
        judged, reading = (judging(Plan(settles, settled=settles, tokens_per_s=1000.0)) for _ in range(2))
        judged.step(few, accepted(), RUNNING)
        reading.step(many, accepted(), RUNNING)
        assert (reading.lost[0] > judged.lost[0]) == dearer


def test_it_is_reckoned_now_and_then_and_where_it_expired() -> None:
    judged = judging(Plan(0, skip=True, tokens_per_s=1000.0))
    judged.step(Cost(), accepted(), RUNNING)
    assert judged.lost == (0.0,) * len(NUMS)  # nothing was measured
    for _ in range(EVERY):
        judged.step(cost(), accepted(), RUNNING)
    assert judged.lost[0] == 0.0
    judged.step(cost(), accepted(), RUNNING)
    assert judged.lost[0] > 0
    judged.expire()
    judged.step(Cost(), accepted(), RUNNING)
    assert judged.lost[0] == 0.0
