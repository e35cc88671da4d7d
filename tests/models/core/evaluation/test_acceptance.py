import numpy as np
import pytest

from models.core.evaluation.acceptance import (
    UNDRAFTED,
    Trace,
    counted,
    difference,
    is_looping,
    mean_accepted_length,
    resample_sums,
    summarise,
)
from models.types import Estimate


def trace(request_id: str, drafted: list[int], accepted: list[int], token_ids: tuple[int, ...] = ()) -> Trace:
    return Trace(request_id=request_id, token_ids=token_ids, drafted=drafted, accepted=accepted, domain="chat")


HAND = [trace("a", [3, 3, 0], [3, 1, 0]), trace("b", [3], [0])]


def population(count: int, chance: float, seed: int, prefix: str = "r") -> list[Trace]:
    """Requests of different lengths whose drafted pairs are accepted with about `chance`."""
    rng = np.random.default_rng(seed)
    traces = []
    for i in range(count):
        steps = int(rng.integers(5, 40))
        accepted = rng.binomial(2, np.clip(chance + rng.normal(0, 0.1), 0, 1), steps)
        traces.append(trace(f"{prefix}{i}", [2] * steps, accepted.tolist()))
    return traces


def test_tau_is_a_ratio_of_sums_and_counts_steps_without_a_draft() -> None:
    assert mean_accepted_length(HAND) == pytest.approx(1 + 4 / 4)
    assert mean_accepted_length([HAND[0]]) == pytest.approx(1 + 4 / 3)
    assert mean_accepted_length([trace("a", [0, 0, 4], [0, 0, 0])]) == 1.0


def test_steps_for_which_nothing_was_to_draft_do_not_count() -> None:
    drafted, accepted = (3, 0, 0, 5), (2, 0, 0, 1)
    assert counted(drafted, accepted, (0, UNDRAFTED, 0, 4)) == ((3, 0, 5), (2, 0, 1))
    assert counted(drafted, accepted, ()) == (drafted, accepted)


def test_a_place_counts_the_steps_that_reached_it_and_not_those_of_a_shorter_draft() -> None:
    rates = [estimate.value for estimate in summarise(HAND).per_position]
    assert rates == pytest.approx([2 / 3, 1 / 3, 1 / 3])
    rates = summarise([trace("a", [1, 2, 2], [1, 1, 2])]).per_position
    assert [estimate.value for estimate in rates] == pytest.approx([1.0, 1 / 2])


def test_figures_and_counts_that_can_not_be_are_refused() -> None:
    with pytest.raises(ValueError, match="1 traces have no verification step"):
        mean_accepted_length([trace("a", [], [])])
    with pytest.raises(ValueError, match="wanted traces, got none"):
        summarise([])
    for use in (summarise, lambda twice: difference(HAND, twice)):
        with pytest.raises(ValueError, match="request_id occurs twice"):
            use([HAND[0], HAND[0]])
    for drafted, accepted in (([2], [3]), ([2], [-1]), ([2, 2], [1])):
        with pytest.raises(ValueError, match="drafted"):
            trace("a", drafted, accepted)


def test_a_summary_without_any_draft_has_tau_and_no_rate() -> None:
    assert summarise(HAND).rate.value == pytest.approx(4 / 9)
    summary = summarise([trace("a", [0, 0], [0, 0])])
    assert summary.rate is None
    assert summary.tau == Estimate(value=1.0, low=1.0, high=1.0)
    assert summary.per_position == ()


def test_a_summary_shows_what_loops_flatter_and_nothing_where_there_are_only_loops() -> None:
    plain = [trace(f"p{i}", [2, 2], [0, 1], token_ids=tuple(range(50))) for i in range(3)]
    loops = [trace("l", [2] * 10, [2] * 10, token_ids=(7,) * 30 + (8,) * 40)]
    summary = summarise(plain + loops)
    assert (summary.num_sequences, summary.num_looping) == (4, 1)
    assert summary.tau.value == pytest.approx(1 + 23 / 16)
    assert summary.tau_without_loops.value == pytest.approx(1.5)
    assert summary.rate_without_loops.value == pytest.approx(0.25)
    summary = summarise([trace("l", [2], [2], token_ids=(7,) * 40)])
    assert summary.tau_without_loops is None
    assert summary.rate_without_loops is None


def test_the_interval_holds_the_truth_about_as_often_as_it_says_and_a_seed_repeats_it() -> None:
    taus = [summarise(population(40, 0.5, seed), num_resamples=300).tau for seed in range(200)]
    held = sum(tau.low <= 2.0 <= tau.high for tau in taus) / 200
    assert 0.89 <= held <= 0.99  # 0.95 nominal, less the percentile interval's shortfall at 40 requests
    traces = population(30, 0.5, seed=0)
    assert summarise(traces, seed=1) == summarise(traces, seed=1) != summarise(traces, seed=2)


def test_lists_of_other_lengths_can_be_compared_and_no_change_is_a_difference_of_nothing() -> None:
    gain = difference(population(80, 0.3, seed=1), population(50, 0.6, seed=2, prefix="s"))
    assert 0.3 < gain.low < gain.high < 0.9
    assert difference(HAND, HAND) == Estimate(value=0.0, low=0.0, high=0.0)


def test_equal_requests_are_paired_and_their_interval_is_narrower() -> None:
    before = population(60, 0.5, seed=1)
    after = [
        trace(t.request_id, list(t.drafted), [min(2, a + 1) if i == 0 else a for i, a in enumerate(t.accepted)])
        for t in reversed(before)
    ]
    paired = difference(before, after)
    unpaired = difference(before, [t.model_copy(update={"request_id": "x" + t.request_id}) for t in after])
    assert paired.value == unpaired.value == pytest.approx(mean_accepted_length(after) - mean_accepted_length(before))
    assert 0 < paired.low < paired.value < paired.high
    assert paired.high - paired.low < 0.5 * (unpaired.high - unpaired.low)


@pytest.mark.parametrize(
    ("token_ids", "looping"),
    [
        ((), False),
        ((5,) * 31, False),
        (tuple(range(100)) + (5,) * 32 + tuple(range(100)), True),
        ((1, 2, 3) * 10, False),
        ((1, 2, 3) * 11, True),
        (tuple(range(20)) * 3, False),
        (tuple(range(64)) * 4 + (99,), True),
        ((tuple(range(64)) * 4)[:-1], False),
        (tuple(range(65)) * 8, False),
        (tuple(np.random.default_rng(0).integers(0, 50, 600)), False),
    ],
    ids=lambda value: f"{len(value)} tokens" if isinstance(value, tuple) else None,
)
def test_a_loop_is_four_turns_and_thirty_two_tokens(token_ids: tuple[int, ...], looping: bool) -> None:
    assert is_looping(token_ids) is looping


def test_resampled_sums_draw_as_many_rows_as_there_are() -> None:
    rows = np.array([[1.0, 10.0], [1.0, 20.0], [1.0, 30.0]])
    sums = resample_sums(rows, np.random.default_rng(0), 5000)
    assert sums.shape == (5000, 2)
    assert (sums[:, 0] == 3).all()
    assert sums[:, 1].mean() == pytest.approx(60, abs=1)
    assert set(np.unique(sums[:, 1])) == set(np.arange(30.0, 91.0, 10.0))
