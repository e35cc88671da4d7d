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


def draw_acceptance(answers: Sequence[Mapping[str, object]], swap_at: int | None, window: int, file: Path) -> Path:
    """Draw τ over the requests that a service answered, a running mean a domain, with the swap marked.

    Args:
        answers: rows with domain, drafted_per_step and accepted_per_step, in the order they ended.
        swap_at: number of requests that were answered by the earlier draft; None draws no mark.
        window: requests that a mean runs over.
        file: where to.
    """
    from matplotlib.figure import Figure  # no pyplot: it keeps state and looks for a display

    figure = Figure(SIZE_INCHES, layout="constrained")
    axes = figure.add_subplot(xlabel="requests answered", ylabel=f"τ, mean of {window} requests")
    counted = [(n, row) for n, row in enumerate(answers) if row["accepted_per_step"]]
    for domain in sorted({str(row["domain"]) for _, row in counted}):
        own = [
            (n, sum(row["accepted_per_step"]), len(row["accepted_per_step"]))
            for n, row in counted
            if row["domain"] == domain
        ]
        # A mean over requests of both drafts would draw the swap as a slope.
        for part in (
            [one for one in own if swap_at is None or one[0] < swap_at],
            [one for one in own if swap_at is not None and one[0] >= swap_at],
        ):
            points = []
            for end in range(1, len(part) + 1):
                recent = part[max(0, end - window) : end]
                points.append((recent[-1][0], 1 + sum(r[1] for r in recent) / sum(r[2] for r in recent)))
            if points:
                later = swap_at is not None and part[0][0] >= swap_at
                axes.plot(
                    *zip(*points, strict=True), label=f"{domain}, {'new' if later else 'first'} draft", linewidth=1.5
                )
    if swap_at is not None:
        axes.axvline(swap_at, color="black", linestyle="--", label="draft swapped")
    axes.legend()
    figure.savefig(file, dpi=150)
    return file
