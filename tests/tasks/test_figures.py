"""Figures are PNG files, also of a single point."""

import pytest

from tasks.figures import draw_losses, draw_tau


@pytest.mark.parametrize("curves", [{"chat": [(1, 1.5), (2, 1.7)], "code": [(2, 1.4)]}, {"chat": [(1, 1.5)]}])
def test_tau_over_versions_is_drawn(tmp_path, curves):
    assert draw_tau(curves, tmp_path / "tau.png").read_bytes().startswith(b"\x89PNG")


def test_losses_are_drawn(tmp_path):
    file = draw_losses([(step, 1 / step) for step in range(1, 50)], tmp_path / "losses.png")
    assert file.read_bytes().startswith(b"\x89PNG")
