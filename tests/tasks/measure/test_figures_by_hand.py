"""What benchmarks conclude from cells, by hand: windows of a swap, the outage of a restart, the stages of the demo, and
how speeds stand to vLLM's, where speculation loses, and whether training slows who is answered.
"""

import pytest

from tasks.measure.demo import report as demo_report
from tasks.measure.load import judge as judge_load
from tasks.measure.speed import judge
from tasks.measure.swap import windows
from tasks.measure.trainer import judge as judge_trainer

SWAP = {"quiet_s": 10.0, "unseen_s": 12.0, "seen_s": 12.1, "proven_s": 15.0, "swap_ms": 50.0}


def test_the_windows_near_a_swap_and_without_are_as_long_and_do_not_meet():
    found = windows(SWAP)
    near, quiet = found["near a swap"], found["without"]
    assert near == pytest.approx((10.95, 13.1))
    assert near[1] - near[0] == pytest.approx(quiet[1] - quiet[0])
    assert quiet[1] == 10.0
    assert found["probation"] == pytest.approx((13.1, 15.0))


def test_a_probation_within_the_second_after_the_swap_has_no_window_of_its_own():
    first, last = windows(SWAP | {"proven_s": 12.5})["probation"]
    assert first == last


def test_the_demos_stages_and_the_rest_sum_to_its_wall_time():
    first = {"wall_s": 100.0, "stages": {"build": 60.0, "refresh": 25.0}}
    second = {"wall_s": 20.0, "stages": {"build": 5.0}}
    found = demo_report(first, second)
    assert found.grids[0].rows == [
        ["build", "60.0", "5.0"],
        ["refresh", "25.0", "–"],
        ["starting and ending", "15.0", "15.0"],
        ["all", "100.0", "20.0"],
    ]
    assert found.verdict.startswith("meets the bar of 15 minutes")
    assert demo_report({"wall_s": 901.0, "stages": {}}, second).verdict.startswith("misses")


def ratio(value):
    return {"overall": {"value": value, "low": value - 0.1, "high": value + 0.1}}


def test_the_verdict_tells_how_far_the_reference_engines_own_forward_pass_is_from_vllms():
    sides = {
        "served pair": {"over_stock": ratio(1.5), "request_over_stock": ratio(1.4), "pair_over_it": ratio(1.0)},
        "reference engine without a draft": {"over_stock": ratio(0.8), "pair_over_it": ratio(1.9)},
    }
    undrafted = "chat, reference engine without a draft: "
    assert judge({"chat": sides}) == (
        "chat: 1.50× vLLM without a draft (aim 1.5), 1.40× over whole requests, ahead of every peer; "
        f"{undrafted}0.80 (0.70 to 0.90) of vLLM's speed."
    )
    sides["reference engine without a draft"] = {"over_stock": None, "pair_over_it": None}
    assert judge({"chat": sides}).endswith(f"{undrafted}no output could be compared.")


def test_speculation_loses_where_the_lower_end_of_one_ratio_is_below_the_bar():
    def at(*values):
        return {2**place: {"ratio": ratio(value)["overall"]} for place, value in enumerate(values)}

    good = {"chat": {"bad": at(1.08, 1.07)}, "code": {"champion": at(1.6, 1.5, 1.3, 1.1)}}
    assert judge_load(good) == (
        "meets the bar (lower end of each ratio at least 0.97): 0 of 6 below it, least 1.07 (0.97 to 1.17) with "
        "chat, bad draft, 2 streams; code, champion, at most 4 streams: lower ends of 1.20 or more (aim 1.4)."
    )
    good["chat"]["bad"][16] = {"ratio": ratio(0.7)["overall"]}
    assert judge_load(good).startswith(
        "misses the bar (lower end of each ratio at least 0.97): 1 of 7 below it, least 0.70 (0.60 to 0.80) with "
        "chat, bad draft, 16 streams; "
    )
    assert judge_load({"chat": good["chat"]}).endswith("16 streams.")


@pytest.mark.parametrize(
    ("found", "word"),
    [
        ((1.2, 0.95, 0), "meets"),
        ((1.21, 0.95, 0), "misses"),
        ((1.2, 0.94, 0), "misses"),
        ((1.2, None, 0), "misses"),
        ((1.2, 0.95, 1), "misses"),
    ],
)
def test_training_beside_the_load_may_slow_neither_the_slowest_gaps_nor_the_streams(found, word):
    assert judge_trainer(*found).startswith(f"{word} the bar (p99 at most 1.2×, tokens/s at least 0.95×): ")
