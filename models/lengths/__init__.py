"""Length policies: how many tokens to draft next.

A policy's module has

- `num_draft_tokens(view, params) -> int`: asked before each step, how many tokens it may draft at most, from 0, a plain
  step, to `view.limit`;
- `go_on(view, params) -> bool`, only in policies that want it: asked after each pass of the draft but the step's last,
  whether it is to draft on. `view` is the one from before the step, with the step's `confidences`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import islice

import numpy as np

RECENT = 32
SMOOTHING = 0.1  # weight of a new time in a running mean


@dataclass(frozen=True)
class Cost:
    """What a step takes on this machine, as far as it has been measured.

    Attributes:
        verify_ms: rows of the target's pass (1 + drafted tokens) → ms, verification included.
        draft_ms: ms of one pass of the draft; None until there was one.
    """

    verify_ms: Mapping[int, float] = field(default_factory=dict)
    draft_ms: float | None = None

    def step_ms(self, num_rows: int, num_passes: int) -> float | None:
        """Estimate a step of `num_rows` rows after `num_passes` passes of the draft; None if nothing was measured.

        Between two measured numbers of rows it is interpolated, beyond them the nearest one's.
        """
        if not self.verify_ms or (num_passes and self.draft_ms is None):
            return None
        rows = sorted(self.verify_ms)
        verify_ms = float(np.interp(num_rows, rows, [self.verify_ms[number] for number in rows]))
        return verify_ms + num_passes * (self.draft_ms or 0.0)

    def after(self, num_rows: int, verify_ms: float, num_passes: int, draft_ms: float) -> "Cost":
        """Return the table with a step's times in its running means; `draft_ms` are those of all its passes."""
        before = self.verify_ms.get(num_rows, verify_ms)
        smooth = {**self.verify_ms, num_rows: before + SMOOTHING * (verify_ms - before)}
        if num_passes == 0:
            return Cost(smooth, self.draft_ms)
        per_pass = draft_ms / num_passes
        known = per_pass if self.draft_ms is None else self.draft_ms
        return Cost(smooth, known + SMOOTHING * (per_pass - known))


@dataclass(frozen=True)
class View:
    """What a policy knows of one sequence and of the engine.

    Attributes:
        limit: K, the most tokens that the engine drafts in a step.
        position: tokens of the sequence so far, prompt included.
        steps: (drafted, accepted) tokens of each of its verification steps so far.
        num_running: sequences that the engine serves now, this one included.
        cost: what steps take.
        confidences: of each pass of the draft in this step, from 0 to 1 (`models.drafts.confidence`).
    """

    limit: int
    position: int
    steps: tuple[tuple[int, int], ...]
    num_running: int
    cost: Cost
    confidences: tuple[float, ...] = ()

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted / drafted tokens of the last 32 steps that drafted; None before the first."""
        recent = list(islice((step for step in reversed(self.steps) if step[0]), RECENT))
        return sum(accepted for _, accepted in recent) / sum(drafted for drafted, _ in recent) if recent else None
