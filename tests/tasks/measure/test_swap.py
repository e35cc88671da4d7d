"""What benchmarks read out of cells, by hand: the windows of a swap."""

import pytest

from tasks.measure.swap import windows

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
