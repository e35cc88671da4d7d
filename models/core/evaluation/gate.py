"""Whether a challenger may replace its champion: pure statistics, no model.

Both are scored by the same offline rule on the same target tokens, at the largest K of the recipe and without look-up,
so that what counts is the head alone. Two questions:

- Is it better? Each window of traffic has conversations that the challenger was not trained on. Those that resemble
  each other are one cluster. Each cluster's difference in accepted tokens a step, weighted by its domain's share of the
  traffic, goes into one test that is looked at after every window (see `models.core.evaluation.betting`). There a
  cluster counts once; how much the window's traffic gains is told beside it, where each counts as often as it is asked,
  and a window whose traffic loses promotes nothing. The test starts anew with each champion. A challenger shown worse
  is given up; the champion's error is shared out among its challengers, the j-th gets alpha_total × 6 / (π² j²), which
  sums to alpha_total however many there are.
- Did a domain pay for it? Each domain's floor is taken on conversations of its own that no draft was trained on: the
  lower bound of (τ challenger − τ best) / τ best must be at least −floor, the best being the past draft that was best
  there. Both are scored on the same conversations, and resampled together. A domain with few of them is reported and
  blocks nothing; nor does one whose answers are so short that no number of them that is kept can tell a loss of the
  floor from none, but where a loss is shown. Else anyone whose requests want a word or two would stop every draft.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Self

import numpy as np
from pydantic import Field

from models.core.evaluation.acceptance import Floats, resample_sums
from models.core.evaluation.betting import MeanTest
from models.core.evaluation.paired import Score, cluster_of, clusters, gain, paired, within
from models.types import DomainEvidence, Estimate, Frozen, GateParams, GateReport, GateTest, GateVerdict


class Evidence(Frozen):
    """What all windows so far say of a challenger, a value that survives between them.

    Attributes:
        challenger: which one of its champion it is, from 1; each is held to a smaller error.
        test: of the mean difference in accepted tokens a step; its bound is K.
        last: the gain of the last window's traffic, with a 95% interval over clusters.
    """

    challenger: int = Field(1, ge=1)
    test: MeanTest
    num_windows: int = 0
    num_conversations: int = 0
    num_clusters: int = 0
    last: Estimate | None = None

    @classmethod
    def start(cls, num_draft_tokens: int, challenger: int = 1) -> Self:
        """Return what is known before the first window; steps accept K tokens at most, challengers count from 1."""
        return cls(challenger=challenger, test=MeanTest(bound=num_draft_tokens))

    def after(
        self, champion: Sequence[Score], challenger: Sequence[Score], shares: Mapping[str, float] | None = None
    ) -> Self:
        """Return the evidence with one window more, of scores of the same conversations that it held out, in any order.

        `shares` are the domains' of current traffic; None if the conversations at hand are a fair sample of it.
        ValueError if the two don't score the same conversations, a domain has no share, or more tokens than K were
        accepted in a step.
        """
        found = clusters(champion, challenger, shares)
        return self.model_copy(
            update={
                "test": self.test.after(found.differences.tolist(), found.weights.tolist()),
                "num_windows": self.num_windows + 1,
                "num_conversations": self.num_conversations + len(champion),
                "num_clusters": self.num_clusters + len(found.differences),
                "last": gain(found),
            }
        )

    def alpha(self, params: GateParams) -> float:
        """Return the error that each of this challenger's bounds is allowed."""
        return allowed_error(self.challenger, params.alpha_total)

    def bounds(self, params: GateParams) -> Estimate:
        """Return the mean gain over all windows; low and high hold at any look, each wrong with a chance of alpha."""
        if self.last is None:
            return Estimate(value=0.0, low=-self.test.bound, high=self.test.bound)
        alpha = self.alpha(params)
        return Estimate(value=self.test.mean, low=self.test.lower(alpha), high=self.test.upper(alpha))


def allowed_error(challenger: int, alpha_total: float) -> float:
    """Return alpha of a champion's j-th challenger, j from 1; ValueError if `challenger` is below 1."""
    if challenger < 1:
        raise ValueError(f"challengers count from 1, got {challenger}")
    return alpha_total * 6 / (math.pi * challenger) ** 2


def decide(
    evidence: Evidence, floors: Mapping[str, DomainEvidence], params: GateParams, learns: bool = True
) -> GateReport:
    """Decide what becomes of the challenger that was scored last.

    It passes if a gain is shown, the last window alone does not speak against it, and no domain may pay more than
    its floor. One that is shown worse is refused. Any other is undecided and learns on; one that can't learn is
    refused. Where nothing was held out the evidence, of all its windows, shows nothing. `floors` are what this
    checkpoint pays in domains.
    """
    found, last = evidence.bounds(params), evidence.last
    blocking = [] if last is None else [reason for floor in floors.values() for reason in floor.refusals]
    if last is None:
        said = ["no conversation was held out"]
    elif found.high < 0:
        said = [f"a loss is shown: {found.value:+.4f} tokens a step, upper bound {found.high:+.4f}"]
    elif found.low <= 0:
        said = [f"no gain shown: {found.value:+.4f} tokens a step, lower bound {found.low:+.4f}"]
    elif last.value < 0:
        said = [f"the last window shows a loss: {last.value:+.4f} tokens a step"]
    else:
        said = []
    verdict: GateVerdict = "refused"
    if not said and not blocking:
        verdict = "passed"
    elif learns and found.high >= 0:
        verdict, windows = "undecided", f"{evidence.num_windows} window{'' if evidence.num_windows == 1 else 's'}"
        standing = f"learning: gain {found.value:+.3f} tokens a step, at least {found.low:+.3f} after {windows}"
        said = [standing, *(said if found.low > 0 else [])]  # the standing says that no gain is shown
    return GateReport(
        verdict=verdict,
        reasons=(*said, *blocking),
        num_draft_tokens=int(evidence.test.bound),
        domains=dict(floors),
        test=GateTest(
            gain=found,
            alpha=evidence.alpha(params),
            test_index=evidence.challenger,
            params=params,
            last=last,
            num_windows=evidence.num_windows,
            num_conversations=evidence.num_conversations,
            num_clusters=evidence.num_clusters,
        ),
    )


def score_floor(best: Sequence[Score], challenger: Sequence[Score], params: GateParams, seed: int) -> DomainEvidence:
    """Hold a challenger against the best past draft of one domain, on the same conversations, else ValueError."""
    sums: dict[str, Floats] = defaultdict(lambda: np.zeros(4))
    for before, after in paired(best, challenger):
        sums[cluster_of(before)] += [before.steps, before.accepted, after.steps, after.accepted]
    rows = np.array([sums[name] for name in sorted(sums)])
    drawn = np.vstack([rows.sum(axis=0), resample_sums(rows, np.random.default_rng(seed), params.num_resamples)])
    best_tau, tau = 1 + drawn[:, 1] / drawn[:, 0], 1 + drawn[:, 3] / drawn[:, 2]
    relative = tau / best_tau - 1
    # Resampling C clusters shows a spread smaller by the root of (C − 1) / C, so it is put back.
    degrees = max(1, len(rows) - 1)
    error = float(relative[1:].std(ddof=1)) * math.sqrt((degrees + 1) / degrees)
    found = within(float(relative[0]), error, degrees, 1 - params.confidence)
    telling = found.value - found.low <= params.floor or found.high < -params.floor
    binding = len(best) >= params.floor_conversations and telling
    refusal = (
        f'domain "{best[0].domain}" may lose: τ {found.value:+.2%} of {best_tau[0]:.3f}, '
        f"lower bound {found.low:+.2%} is below the floor of {-params.floor:.2%}"
    )
    return DomainEvidence(
        num_conversations=len(best),
        tau_after=float(tau[0]),
        reference=float(best_tau[0]),
        change=found,
        refusals=(refusal,) if binding and found.low < -params.floor else (),
        binding=binding,
    )
