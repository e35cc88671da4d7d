"""Figures are PNG files, also of a single point and where a domain lacks a side."""

from collections.abc import Callable
from pathlib import Path

import pytest

from infra.views.figures import draw_acceptance, draw_latency, draw_ratios, draw_refreshes, draw_speeds
from models.types import Estimate

ANSWERS = [
    {"domain": "chat", "draft_version": str(1 + number // 10), "drafted_per_step": (3,), "accepted_per_step": (2,)}
    for number in range(20)
]
ALONE = {"median": 7.0, "p10": 6.0, "p90": 8.0}
SPEEDS = {"chat": {"pair": {"median": 11.0, "p10": 9.0, "p90": 12.0}, "alone": ALONE}, "code": {"alone": ALONE}}
RATIOS = {"chat": {"bad": [(1, 0.98, 0.97, 1.0), (64, 0.9, 0.8, 1.0)]}, "code": {"bad": [(1, 1.0, 0.9, 1.1)]}}
TAU = [Estimate(value=1.5, low=1.4, high=1.6), Estimate(value=1.7, low=1.6, high=1.9)]


@pytest.mark.parametrize(
    "draw",
    [
        lambda file: draw_acceptance(ANSWERS, 5, file),
        lambda file: draw_speeds(SPEEDS, "tokens/s", file),
        lambda file: draw_ratios(RATIOS, 0.97, "streams", "on ÷ off", file),
        lambda file: draw_latency({"all": [(-1.0, 12.0), (0.5, 30.0)]}, "seconds from a swap", file),
        lambda file: draw_refreshes({"chat": TAU, "code": TAU[::-1]}, ["draft 2", "passed\ndraft 3"], file),
    ],
    ids=["acceptance", "speeds", "ratios", "latency", "refreshes"],
)
def test_a_figure_is_a_picture(draw: Callable[[Path], Path], tmp_path: Path) -> None:
    assert draw(tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")
