"""The demo's stages, by hand."""

from tests.benchmarks.demo import table


def test_the_demos_stages_and_the_rest_sum_to_its_wall_time() -> None:
    first = {"wall_s": 100.0, "stages": {"build": 60.0, "refresh": 25.0}}
    assert table([first, {"wall_s": 20.0, "stages": {"build": 5.0}}]) == [
        ["build", "60.0", "5.0"],
        ["refresh", "25.0", "–"],
        ["starting and ending", "15.0", "15.0"],
        ["all", "100.0", "20.0"],
    ]
