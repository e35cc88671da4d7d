"""Figures are PNG files, also of a single point."""

from infra.views.figures import (
    draw_latency,
    draw_ratios,
    draw_refreshes,
    draw_speeds,
)
from models.types import Estimate


def test_speeds_are_drawn_also_where_a_domain_lacks_a_side(tmp_path):
    speeds = {"chat": {"pair": (11.0, 9.0, 12.0), "alone": (7.0, 7.0, 7.0)}, "code": {"alone": (7.0, 6.0, 8.0)}}
    assert draw_speeds(speeds, "tokens/s", tmp_path / "speed.png").read_bytes().startswith(b"\x89PNG")


def test_ratios_are_drawn_also_of_a_single_load(tmp_path):
    lines = {"chat": {"bad": [(1, 0.98, 0.97, 1.0), (64, 0.9, 0.8, 1.0)]}, "code": {"bad": [(1, 1.0, 0.9, 1.1)]}}
    file = draw_ratios(lines, 0.97, "streams", "on ÷ off", tmp_path / "load.png")
    assert file.read_bytes().startswith(b"\x89PNG")


def test_latencies_are_drawn_as_dots(tmp_path):
    file = draw_latency({"all": [(-1.0, 12.0), (0.5, 30.0)]}, "seconds from a swap", tmp_path / "swap.png")
    assert file.read_bytes().startswith(b"\x89PNG")


def test_tau_over_refreshes_is_drawn_with_its_intervals(tmp_path):
    tau = [Estimate(value=1.5, low=1.4, high=1.6), Estimate(value=1.7, low=1.6, high=1.9)]
    file = draw_refreshes({"chat": tau, "code": tau[::-1]}, ["draft 2", "passed\ndraft 3"], tmp_path / "r.png")
    assert file.read_bytes().startswith(b"\x89PNG")
