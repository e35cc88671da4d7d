"""Whether a promoted draft does worse than the one before it, on the requests that it serves: pure statistics.

Both drafts were scored on the same answers. A request's figure is its target steps per token, what a token costs: the
inverse of τ. It lies between 1 / (K + 1) and 1, and thus the difference of two is below 1 whatever K is; differences in
tokens per step, bounded by K, would need several times the requests.

The test is the gate's (models/core/evaluation/betting.py), which may be looked at after every request. All requests
together have half of the error, the domains the other half: the j-th one to appear gets 6 / (π² j²) of it. All together
must lose nothing; a domain may lose the gate's floor, as it might to be promoted.
"""

import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np

from models.core.evaluation.acceptance import Floats
from models.core.evaluation.betting import MeanTest
from models.core.evaluation.gate import allowed_error
from models.types import ALL, Finding


def findings(
    domains: Sequence[str], costs: Floats, num_draft_tokens: int, floor: float, alpha: float
) -> dict[str, Finding]:
    """Return what the requests compared so far say of each domain and, under ALL, of all of them.

    Costs [N, 2] are steps per token with the promoted draft and with the one before it, from 1 / (K + 1) to 1, in the
    order in which requests were compared. A domain may lose the share `floor` of τ; `alpha` is the chance that any
    finding is ever a loss by luck alone. ValueError for no requests, or costs that are no N pairs in their range.
    """
    if not len(domains) or costs.shape != (len(domains), 2):
        raise ValueError(f"wanted a pair of costs for each request, got {costs.shape} for {len(domains)}")
    least = 1 / (num_draft_tokens + 1)
    if not bool(((costs > least - 1e-9) & (costs < 1 + 1e-9)).all()):
        raise ValueError(f"steps per token must be from {least:g} to 1, got {costs.min():g} to {costs.max():g}")
    errors, names = allowed_errors(alpha), np.array(domains)
    found = {ALL: _finding(costs, least, 0.0, next(errors))}
    for domain in dict.fromkeys(domains):
        found[domain] = _finding(costs[names == domain], least, floor, next(errors))
    return found


def allowed_errors(alpha: float) -> Iterator[float]:
    """Yield the error of the finding on all requests, then of the first domain that appears, the second, and so on."""
    yield alpha / 2
    for place in itertools.count(1):
        yield allowed_error(place, alpha / 2)


def _finding(costs: Floats, least: float, allowed: float, alpha: float) -> Finding:
    # τ may fall to 1 − allowed of what it was, so this is above 0 where it fell further.
    excess = (1 - allowed) * costs[:, 0] - costs[:, 1]
    test = MeanTest(bound=bound_of(allowed, least)).after(excess.tolist())
    cost, previous = costs.mean(axis=0)
    return Finding(
        num_requests=len(costs),
        tau=float(1 / cost),
        previous_tau=float(1 / previous),
        allowed=allowed,
        excess=float(excess.mean()),
        excess_low=test.lower(alpha),
        alpha=alpha,
        lost=test.log_wealth() >= -math.log(alpha),
    )


def bound_of(allowed: float, least: float) -> float:
    """Return what no request's excess goes beyond, up or down."""
    return 1 - (1 - allowed) * least + 1e-9
