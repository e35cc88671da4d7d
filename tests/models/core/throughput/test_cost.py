import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from models.core.throughput.cost import Cost, Time, load_cost, save_cost

TIMES = [(1, 1, 0, 10.0), (1, 4, 0, 13.0), (4, 4, 0, 16.0), (4, 16, 0, 40.0), (1, 1, 2, 14.0), (4, 4, 1, 20.0)]
TABLE = Cost.measured([Time(*time) for time in TIMES], "this machine")
PLAIN, DRAFTED = Time(1, 1, 0, 10.0), Time(1, 4, 3, 19.0)


def ratio(cost: Cost) -> float:
    """Return how much longer a drafted step takes than a plain one, which is what K depends on."""
    return cost.step_ms(*DRAFTED[:3]) / cost.step_ms(*PLAIN[:3])


@pytest.mark.parametrize(
    ("sequences", "rows", "passes", "ms"),
    [
        (1, 1, 0, 10.0),
        (1, 2, 0, 11.0),
        (1, 4, 3, 13.0 + 3 * 2.0),
        (1, 7, 0, 16.0),  # as steep as before
        (4, 4, 1, 20.0),
        (2, 2, 0, 12.0),  # a third of the way from 1 to 4 sequences, at a row each
        (8, 16, 0, 40.0),  # beyond the last, rows are what counts
    ],
)
def test_steps_are_interpolated_between_what_was_measured(sequences: int, rows: int, passes: int, ms: float) -> None:
    assert TABLE.step_ms(sequences, rows, passes) == pytest.approx(ms)


def test_what_else_ran_for_half_of_a_steps_measurement_is_not_in_the_table() -> None:
    """As once measured at 16 sequences: a plain step seemed to take as long as one of twice the rows."""
    seen = {
        (16, 0): [53.9, 57.2, 27.5, 26.9],
        (32, 0): [42.6, 39.9, 39.5, 41.3],
        (16, 3): [32.8, 57.4, 33.4, 31.8],
    }
    cost = Cost.measured([Time(16, *step, ms) for step, each in seen.items() for ms in each])
    assert [cost.step_ms(16, *step) for step in seen] == pytest.approx([27, 40, 32], rel=0.05)


def test_a_table_of_noise_still_rises_with_the_rows() -> None:
    cost = Cost.measured([Time(1, 1, 0, 10.0), Time(1, 2, 0, 9.0), Time(1, 3, 0, 12.0)])
    assert [cost.step_ms(1, rows, 0) for rows in (1, 2, 3)] == pytest.approx([9.5, 9.5, 12.0])


def test_a_draft_that_says_all_in_one_pass_makes_one_at_most() -> None:
    cost = replace(TABLE, one_pass=True)
    assert cost.step_ms(1, 4, 3) == pytest.approx(13.0 + 2.0)
    assert cost.step_ms(1, 4, 0) == pytest.approx(13.0)
    assert cost.after(Time(1, 4, 1, 15.0)).step_ms(1, 4, 3) == pytest.approx(15.0)


def test_passes_over_some_of_the_sequences_take_what_as_many_sequences_passes_take() -> None:
    assert [TABLE.pass_ms(number) for number in (1, 4)] == pytest.approx([2.0, 4.0])
    expected = 16.0 + 3 * 2.0  # four sequences' plain step, three passes over one of them
    as_expected = TABLE.after(Time(4, 4, 3, expected, num_drafted=1))
    assert [as_expected.pass_ms(number) for number in (1, 4)] == pytest.approx([2.0, 4.0])
    dearer = TABLE.after(Time(4, 4, 3, 1.2 * expected, num_drafted=1))
    assert dearer.curves[0].draft != TABLE.curves[0].draft
    assert dearer.curves[1].draft == TABLE.curves[1].draft
    with pytest.raises(ValueError, match="wanted passes over at most the step's sequences"):
        TABLE.after(Time(4, 4, 3, 20.0, num_drafted=5))


def test_a_prompts_token_takes_a_draft_as_long_as_one_sequence_more_and_is_no_part_of_a_steps_time() -> None:
    """A pass takes 2 ms over one sequence and 4 over four."""
    reading = replace(TABLE, prompt_tokens=30.0)
    assert [cost.line(4).prompt_ms for cost in (TABLE, reading)] == pytest.approx([0.0, 30 * 2 / 3])
    of_one = replace(Cost.measured([PLAIN, Time(1, 1, 2, 14.0)]), prompt_tokens=30.0)
    assert of_one.line(1).prompt_ms == 0  # which tells nothing of one sequence more
    assert reading.step_ms(1, 4, 3) == TABLE.step_ms(1, 4, 3)
    assert reading.after(Time(1, 4, 3, 19.0)).curves == TABLE.after(Time(1, 4, 3, 19.0)).curves


@pytest.mark.parametrize("sequences", [1, 3, 16, 40])
def test_a_line_says_of_each_step_what_the_table_does(sequences: int) -> None:
    line = TABLE.line(sequences)
    for rows in (sequences, sequences + 1, 2 * sequences, 3.3 * sequences, 20 * sequences):
        for passes in (0, 1, 3):
            assert line.step_ms(rows, passes) == pytest.approx(TABLE.step_ms(sequences, rows, passes))


def test_nothing_measured_tells_nothing_and_a_table_needs_a_step_without_passes() -> None:
    assert Cost().step_ms(1, 1, 0) is None
    assert Cost.measured([Time(1, 1, 0, 10.0)]).step_ms(1, 1, 1) is None
    with pytest.raises(ValueError, match="got none"):
        Cost.measured([Time(1, 1, 1, 10.0)])


def test_a_table_that_was_never_measured_grows_with_the_steps() -> None:
    cost = Cost().after(Time(1, 4, 0, 12.0)).after(Time(1, 4, 3, 18.0))
    assert cost.step_ms(1, 4, 3) == pytest.approx(18.0)
    cost = cost.after(Time(1, 1, 0, 10.0))
    assert cost.step_ms(1, 1, 0) == pytest.approx(10.0)
    assert cost.step_ms(1, 2, 1) == pytest.approx(10.0 + 2 / 3 + 2.0)


def test_what_the_table_tells_can_be_sent_to_another_process() -> None:
    """A number of NumPy's among the figures of a request ended the engine's process."""
    cost, rng = TABLE, np.random.default_rng(0)
    for _ in range(200):  # in which more rows seem faster now and then, so that points are pooled
        cost = cost.after(Time(1, 4, 0, 9.0 * rng.lognormal(0, 0.1))).after(Time(1, 1, 0, 10.0))
    told = [cost.drift, cost.spread, *(ms for curve in cost.curves for ms in (*curve.points, curve.draft))]
    assert {type(one) for one in told} == {float}


def test_one_step_of_100_ms_changes_next_to_nothing() -> None:
    cost = TABLE
    for _ in range(200):
        cost = cost.after(DRAFTED)
    assert ratio(cost.after(DRAFTED._replace(ms=119.0))) == pytest.approx(ratio(cost), rel=0.005)


def noisy(time: Time, rng: np.random.Generator, slowness: float = 1.0) -> Time:
    return time._replace(ms=time.ms * slowness * rng.lognormal(0, 0.05))


def test_a_machine_that_slows_down_changes_all_steps_alike() -> None:
    rng, cost = np.random.default_rng(0), TABLE
    for number in range(1000):
        cost = cost.after(noisy(DRAFTED if number % 100 else PLAIN, rng, 1.4 if number >= 500 else 1.0))
    assert ratio(cost) == pytest.approx(1.9, rel=0.03)
    assert cost.step_ms(1, 4, 3) == pytest.approx(19.0 * 1.4, rel=0.1)


def test_a_wrong_table_is_put_right_by_the_steps_that_are_seen() -> None:
    """The table says that a drafted step takes 1.9 times a plain one; in truth it takes 1.5 times."""
    rng, cost = np.random.default_rng(0), TABLE
    for number in range(6000):
        cost = cost.after(noisy(DRAFTED._replace(ms=15.0) if number % 50 else PLAIN, rng))
    assert ratio(cost) == pytest.approx(1.5, rel=0.05)


@pytest.mark.parametrize(("turns", "slowness"), [(1, 1.5), (5, 1.0), (5, 1.5)])
def test_points_that_take_turns_put_right_what_was_wrong_of_their_ratio(turns: int, slowness: float) -> None:
    """As at 16 sequences: 1.9 times a plain step, says the table; 2.4 times in truth. The machine is slow now and then.

    Each change to the other kind of step looks like a change of the machine at first.
    """
    rng, cost, wandering = np.random.default_rng(0), TABLE, 1.0
    for number in range(80):
        if number % 30 == 0:
            wandering = slowness if number // 30 % 2 else 1.0
        cost = cost.after(noisy(DRAFTED._replace(ms=24.0) if number // turns % 2 else PLAIN, rng, wandering))
    assert ratio(cost) == pytest.approx(2.4, rel=0.05)


@pytest.mark.parametrize(
    "time", [Time(0, 1, 0, 1.0), Time(4, 3, 0, 1.0), Time(1, 1, -1, 1.0), Time(1, 1, 0, 0.0), Time(1, 1, 0, math.nan)]
)
def test_times_that_can_not_be_are_refused(time: Time) -> None:
    with pytest.raises(ValueError, match="wanted a step of"):
        TABLE.after(time)
    with pytest.raises(ValueError, match="wanted a step of"):
        Cost.measured([time])


def test_where_noise_hides_what_a_pass_takes_the_other_numbers_of_sequences_tell() -> None:
    times = [Time(num, num, 0, 10.0) for num in (1, 4)] + [Time(num, 9 * num, 0, 12.0) for num in (1, 4)]
    table = Cost.measured([*times, Time(1, 4, 3, 10.1), Time(4, 16, 3, 19.0)])
    assert table.curves[0].draft is None
    assert 2 < table.step_ms(1, 1, 1) - table.step_ms(1, 1, 0) < 3
    alone = Cost.measured([Time(1, 1, 0, 10.0), Time(1, 4, 3, 9.0)])
    assert alone.step_ms(1, 1, 1) == pytest.approx(10.2)


@pytest.mark.parametrize("every", [4, 40, 10**9])
def test_how_far_a_plain_step_may_be_off_is_known(every: int) -> None:
    """Points are 10% off and a pass is 30%; one step in `every` is plain. Its error is within two of the doubt's."""
    rng, within, doubts = np.random.default_rng(0), 0, []
    for _ in range(60):
        truth = [10.0, 13.0, 2.0]
        off = np.exp(rng.standard_normal(3) * [0.1, 0.1, 0.3])
        one, four, a_pass = (ms * by for ms, by in zip(truth, off, strict=True))
        cost = Cost.measured([Time(1, 1, 0, one), Time(1, 4, 0, max(four, one)), Time(1, 1, 3, one + 3 * a_pass)])
        for number in range(300):
            cost = cost.after(noisy(PLAIN if number % every == every - 1 else DRAFTED, rng))
        within += abs(math.log(cost.step_ms(1, 1, 0) / 10)) < 2 * cost.doubt(1)
        doubts.append(cost.doubt(1))
    print(f"one plain step in {every}: within two of its doubt in {within} of 60, doubt {np.mean(doubts):.3f}")
    assert within >= 54
    assert np.mean(doubts) < {4: 0.03, 40: 0.06, 10**9: 0.3}[every]


def test_a_table_is_read_as_it_was_saved(tmp_path: Path) -> None:
    file, cost = tmp_path / "cost.json", TABLE
    for _ in range(50):
        cost = cost.after(Time(4, 8, 1, 35.0))
    save_cost(cost, file)
    read = load_cost(file, "this machine")
    for step in ((1, 3, 2), (2, 5, 0), (4, 8, 1), (9, 18, 1)):
        assert read.step_ms(*step) == pytest.approx(cost.step_ms(*step))
    assert not read.grows


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lambda text: text[: len(text) // 2], "no table"),
        (lambda text: text.replace("this machine", "another one"), "measured for another one, wanted this machine"),
        (lambda text: text.replace('"format": 2', '"format": 1'), "no table"),
        (lambda text: text.replace("10.0", "NaN"), "no table"),
        (lambda text: text.replace("[10.0, 13.0]", "[10.0]"), "no table"),
    ],
)
def test_a_torn_or_foreign_table_is_refused(tmp_path: Path, change: Callable[[str], str], fault: str) -> None:
    file = tmp_path / "cost.json"
    save_cost(TABLE, file)
    text = change(file.read_text())
    assert text != file.read_text()
    file.write_text(text)
    with pytest.raises(ValueError, match=fault):
        load_cost(file, "this machine")


def test_a_table_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cost.json is no table"):
        load_cost(tmp_path / "cost.json", "this machine")
