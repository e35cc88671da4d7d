"""Whether served acceptance has fallen so far that a refresh should start, and how many rows that refresh wants.

A domain is held against what its draft was promoted for: its own τ at the gate or, for a domain that the draft has
never seen, the best of the others. Between `fall` and `recover` nothing is said, so that a figure on the edge does not
flap: acceptance of a few hundred requests goes up and down by itself.
"""

import math
from collections.abc import Mapping

from models.params import Frozen

# Standard deviation of a conversation's gain in accepted tokens per step; of the demo's drafts, 100 conversations gave
# the gain to ± 0.047.
SPREAD = 0.25
# Standard normal quantiles: a one-sided bound at 95%, which is to lie above 0 in 80% of refreshes.
BOUND, POWER = 1.645, 0.842
# A refresh seldom brings back all that was lost.
SHARE_BACK = 0.5
LEAST_GAIN = 0.05


class Params(Frozen):
    """Thresholds.

    Attributes:
        fall: share of the promised gain over 1.0 whose loss counts as a fall.
        recover: share whose loss still counts as recovered; below `fall`, so that a figure on the edge does not flap.
        min_requests: a domain's last requests that are needed to say anything.
        period_s: seconds between looks.
    """

    fall: float = 0.3
    recover: float = 0.15
    min_requests: int = 64
    period_s: float = 5.0


class Standing(Frozen):
    """What can be said of a domain: τ that its draft promised, τ that is served, and whether that has fallen."""

    promised: float
    served: float
    fallen: bool


def look(
    promised: Mapping[str, float], served: Mapping[str, Mapping[str, float | int | None]], params: Params
) -> dict[str, Standing]:
    """Return the domains that have fallen or are where they should be; of others nothing can be said.

    Args:
        promised: domain to τ at the gate.
        served: domain to "requests" and "mean_accepted_length", see `Recorder.acceptance`.
        params: thresholds.
    """
    seen = {}
    for domain, figures in served.items():
        tau, wanted = figures["mean_accepted_length"], promised.get(domain, max(promised.values(), default=1.0))
        if tau is None or (figures["requests"] or 0) < params.min_requests or wanted <= 1:
            continue
        lost = 1 - (tau - 1) / (wanted - 1)
        if lost > params.fall or lost <= params.recover:
            seen[domain] = Standing(promised=wanted, served=tau, fallen=lost > params.fall)
    return seen


def enough_rows(lost: float, num_rows: int, held_out_fraction: float) -> int:
    """Return how many of the waiting rows must be of a fallen domain for the gate to show a gain there.

    The gate sees all of the traffic, of which the domain is a share s = d / n, and d rows bring back g tokens per step
    there and nothing elsewhere. Of n rows it scores f n; the normal approximation of its bound passes 0 where
    s g √(f n) ≥ (BOUND + POWER) × SPREAD, so d ≥ (BOUND + POWER) × SPREAD × √(n / f) / g. Rows are taken as
    independent: where many belong to one cluster, the gate is undecided and goes on with the next rows.

    Args:
        lost: promised minus served τ.
        num_rows: n, rows of all domains that wait.
        held_out_fraction: f, the share that the gate gets.

    Returns:
        d; above n where not even all of them would do.
    """
    gain = max(SHARE_BACK * lost, LEAST_GAIN)
    return math.ceil((BOUND + POWER) * SPREAD * math.sqrt(num_rows / held_out_fraction) / gain)
