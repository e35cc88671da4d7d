"""Figures that are kept with runs in MLflow."""

from collections.abc import Mapping, Sequence
from pathlib import Path

SIZE_INCHES = (6.4, 3.6)


def draw_losses(losses: Sequence[tuple[int, float]], file: Path) -> Path:
    """Draw (optimizer step, running mean of the loss) into a PNG and return `file`."""
    return _draw({"loss": losses}, "optimizer step", "loss", file)


def draw_tau(taus: Mapping[str, Sequence[tuple[int, float]]], file: Path) -> Path:
    """Draw τ over the versions of a line of champions into a PNG.

    Args:
        taus: domain to (version, τ), oldest first.
        file: where to.
    """
    return _draw(taus, "draft version", "τ, mean accepted length", file)


def _draw(curves: Mapping[str, Sequence[tuple[int, float]]], x_label: str, y_label: str, file: Path) -> Path:
    from matplotlib.figure import Figure  # no pyplot: it keeps state and looks for a display

    figure = Figure(SIZE_INCHES, layout="constrained")
    axes = figure.add_subplot(xlabel=x_label, ylabel=y_label)
    for name, points in curves.items():
        axes.plot(*zip(*points, strict=True), label=name, marker="o" if len(points) < 20 else "")
    axes.legend()
    figure.savefig(file, dpi=150)
    return file
