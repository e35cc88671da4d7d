"""Hidden states that the service captured of the rows that a refresh reads."""

from pathlib import Path

from infra.captured import CapturedFiles
from infra.settings import load_settings
from models.core.learning.captured import Captures
from models.targets import describe
from tasks.stages.reporting import run_logger


def captures_of(target_dir: Path) -> Captures:
    """Return what was captured of a target's answers."""
    return Captures(CapturedFiles(load_settings().querylog).path_of, describe(target_dir).sha256)


def tell(captures: Captures, what: str) -> None:
    """Log how many answers' states were captured, and why the target was run for others; nothing if none was wanted."""
    if captures.counts:
        counts = ", ".join(f"{number} {why}" for why, number in sorted(captures.counts.items()))
        run_logger().info("hidden states of answers to %s: %s", what, counts)
