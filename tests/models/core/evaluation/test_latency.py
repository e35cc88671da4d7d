import numpy as np
import pytest

from models.core.evaluation.latency import (
    Decoded,
    compare_blocks,
    compare_percentiles,
    compare_speed,
    decoded,
    inter_token_spans,
    longest_silence,
    percentile,
    spread,
    touching,
)


def test_tokens_that_come_together_are_one_arrival_and_the_first_begins_the_clock() -> None:
    assert inter_token_spans(10.0, [500.0, 700.0, 700.0, 1000.0]) == [(10.5, 10.7), (10.7, 11.0)]
    assert decoded([500.0, 700.0, 700.0, 1000.0]) == Decoded(3, 0.5)
    # Where it all came at once there is no speed to speak of.
    assert [decoded(arrivals) for arrivals in ([500.0], [], [500.0, 500.0])] == [None] * 3


def test_a_span_that_reaches_into_a_window_counts_and_one_beside_it_does_not() -> None:
    spans = [(0.0, 0.9), (0.9, 1.5), (1.5, 2.5), (2.5, 3.5), (3.5, 4.0)]
    assert touching(spans, (1.0, 3.0)) == pytest.approx([600, 1000, 1000])
    assert touching(spans, (5.0, 6.0)) == []
    assert touching([(0.0, 9.0)], (4.0, 5.0)) == [9000.0]


def test_the_longest_silence_reaches_to_the_windows_end() -> None:
    assert longest_silence([1.0, 2.0, 2.5], (0.0, 10.0)) == (2.5, 10.0)
    assert longest_silence([], (0.0, 10.0)) == (0.0, 10.0)
    assert longest_silence([11.0, 1.0, 5.0, 9.5], (0.0, 10.0)) == (5.0, 9.5)


def test_a_percentile_lies_between_two_values() -> None:
    assert percentile([1.0, 2.0, 3.0, 4.0], 50) == 2.5
    assert spread(list(range(101))).model_dump() == {"median": 50.0, "p10": 10.0, "p90": 90.0}
    with pytest.raises(ValueError, match="got no values"):
        percentile([], 99)


def test_a_speed_ratio_is_paired_by_prompt_and_weighs_the_whole_by_seconds() -> None:
    of = {"a": Decoded(10, 1.0), "b": Decoded(10, 1.0), "only here": Decoded(1, 9.0)}
    to = {"a": Decoded(10, 2.0), "b": Decoded(10, 4.0)}
    ratio = compare_speed(of, to)
    assert ratio.prompts.median == pytest.approx(3.0)
    assert (ratio.overall.low, ratio.overall.value, ratio.overall.high) == pytest.approx((2.0, 3.0, 4.0))
    assert compare_speed({"a": Decoded(1, 1.0)}, {"b": Decoded(1, 1.0)}) is None


def test_blocks_that_took_turns_are_compared_over_all_of_their_seconds() -> None:
    fast, slow = {"0": Decoded(10, 1.0), "1": Decoded(30, 3.0)}, {"0": Decoded(10, 2.0), "1": Decoded(30, 6.0)}
    ratio = compare_blocks([(fast, slow), (fast, slow)])
    assert (ratio.low, ratio.value, ratio.high) == pytest.approx((2.0, 2.0, 2.0))
    # A slow block of many requests among four is drawn never, and three times of four.
    way, slowed = ({str(n): Decoded(10, seconds) for n in range(100)} for seconds in (1.0, 2.0))
    ratio = compare_blocks([(way, way), (way, way), (way, way), (way, slowed)])
    assert (ratio.low, ratio.value, ratio.high) == pytest.approx((1.0, 1.25, 1.75))
    for pairs in ([], [(fast, slow), ({"0": Decoded(1, 1.0)}, {"1": Decoded(1, 1.0)})]):
        with pytest.raises(ValueError, match="wanted some in each"):
            compare_blocks(pairs)


@pytest.mark.slow
def test_intervals_hold_the_truth_where_the_machine_changes_its_speed_from_block_to_block() -> None:
    rng, held = np.random.default_rng(0), {"blocks": 0, "requests": 0}
    for _ in range(40):
        pairs = [(_block(rng), _block(rng)) for _ in range(24)]  # both ways are equally fast
        one_block = tuple(
            {f"{number} {request}": one for number, pair in enumerate(pairs) for request, one in pair[way].items()}
            for way in (0, 1)
        )
        for name, blocks in {"blocks": pairs, "requests": [one_block]}.items():
            found = compare_blocks(blocks)
            held[name] += found.low <= 1 <= found.high
    print(f"of 40 intervals of 95% the truth is in {held}")
    assert held["blocks"] >= 32
    assert held["requests"] <= 20


def _block(rng: np.random.Generator) -> dict[str, Decoded]:
    """32 requests of some 40 tokens; what disturbs the machine, 5%, is the whole block's, 5% more each request's."""
    speed = rng.normal(1, 0.05)
    return {str(n): Decoded(40, 40 / speed / rng.normal(1, 0.05)) for n in range(32)}


@pytest.mark.slow
def test_a_percentile_ratio_pools_its_groups_and_resamples_them() -> None:
    quiet = [[10.0] * 50 for _ in range(20)]
    stalled = [[10.0] * 49 + [30.0] for _ in range(20)]
    estimate = compare_percentiles(stalled, quiet, 99)
    assert (estimate.low, estimate.value, estimate.high) == pytest.approx((3.0, 3.0, 3.0))
    one_stall = [*quiet[1:], stalled[0]]
    assert compare_percentiles(one_stall, quiet, 99).value == pytest.approx(1.0)
    assert compare_percentiles([*one_stall, []], quiet, 100).value == pytest.approx(3.0)
    assert compare_percentiles(one_stall, quiet, 100).low == pytest.approx(1.0)  # that one window may not be drawn
    with pytest.raises(ValueError, match="without any figures"):
        compare_percentiles([[]], quiet, 99)
