"""Whether a challenger may replace its champion: pure statistics, no model.

Both are scored by the same offline rule on the same target tokens, at the largest K of the recipe and without look-up,
so that what counts is the head alone. Two questions:

- Is it better? Each window of traffic has conversations that the challenger was not trained on. Those that resemble
  each other are one cluster. Each cluster's difference in accepted tokens a step, weighted by its domain's share of the
  traffic, goes into one test that is looked at after every window (see `models.core.evaluation.gate`). There a
  cluster counts once; how much the window's traffic gains is told beside it, where each counts as often as it is asked,
  and a window whose traffic loses promotes nothing. The test starts anew with each champion. A challenger shown worse
  is given up; the champion's error is shared out among its challengers, the j-th gets alpha_total × 6 / (π² j²), which
  sums to alpha_total however many there are.
- Did a domain pay for it? Each domain's floor is taken on conversations of its own that no draft was trained on: the
  lower bound of (τ challenger − τ best) / τ best must be at least −floor, the best being the past draft that was best
  there. Both are scored on the same conversations, and resampled together. A domain with few of them is reported and
  blocks nothing; nor does one whose answers are so short that no number of them that is kept can tell a loss of the
  floor from none, but where a loss is shown. Else anyone whose requests want a word or two would stop every draft.

A lower and an upper bound of a mean that may be looked at after every observation come from betting. Whoever bets share
b of a wealth of 1 that the mean of values in [−K, K] is above m has

    W(m) = Π_i (1 + b (x_i − m) / (m + K)) ^ w_i

after values x_i. If the mean is m or less, W is expected never to grow, and the chance that it ever reaches 1 / α is at
most α (Ville). So the smallest m at which it has not reached that bounds the mean from below, however often one looks.
Several shares are bet at once, each with a part of the wealth: large ones find large means soon, small ones small means
in the end.

- The shares never depend on what was seen. So values may have different means, as those of different drafts and kinds
  of traffic do: what is bounded is the weighted mean of the means that each value had given all before it (the
  arithmetic mean is above the geometric), and the order of values makes no difference.
- A value of weight w ≤ 1 counts as that part of a value; (1 + z)^w ≤ 1 + w z keeps the bound.
- Hence the weights of equal values are all that need be kept: a histogram, each value rounded down for the lower bound
  and up for the upper one.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Annotated, Self

import numpy as np
from pydantic import Field

from models.core.evaluation.acceptance import Floats, resample_sums
from models.core.evaluation.paired import Score, cluster_of, clusters, gain, paired, within
from models.types import DomainEvidence, Estimate, Frozen, GateParams, GateReport, GateTest, GateVerdict, Positive

PAPER = "arXiv:2010.09686, sections 4.1 and 4.3, with bets held constant"

NUM_BINS = 2048  # even, so that 0 is the edge of a bin and stays itself
BETS = np.array([0.95, 0.5, 0.2, 0.08, 0.03])
PARTS = np.array([0.6, 0.16, 0.08, 0.08, 0.08])  # of the wealth; the large bet finds a small gain in windows of 50


def log_growth(values: Floats, weights: Floats, mean: float, bound: float) -> Floats:
    """Return [..., B] by how much the log of each bet's wealth grows, against a mean above −bound.

    Values [..., N] are in [−bound, bound], weights [..., N] in [0, 1].
    """
    odds = (values - mean) / (mean + bound)
    return np.stack([(weights * np.log1p(bet * odds)).sum(axis=-1) for bet in BETS], axis=-1)


def log_wealth(growth: Floats) -> Floats:
    """Return the log of the wealth over all bets, whose logs have grown by [..., B]: [...]."""
    return np.asarray(np.logaddexp.reduce(growth + np.log(PARTS), axis=-1))


class MeanTest(Frozen):
    """What is known of a mean: a value that goes on as values come in, and may be written down in between.

    Values are in [−bound, bound]; `counts` are bin to the weight of the values in it, bin 0 from −bound on.
    """

    bound: Positive
    counts: dict[Annotated[int, Field(ge=0, lt=NUM_BINS)], Positive] = Field(default_factory=dict)
    total: float = Field(0.0, allow_inf_nan=False)

    def after(self, values: Sequence[float], weights: Sequence[float] | None = None) -> Self:
        """Return the test with more values, each in [−bound, bound].

        Weights, by default 1, are in [0, 1] and chosen before the value was seen. ValueError if a value or weight is
        out of range.
        """
        shares = [1.0] * len(values) if weights is None else weights
        counts, total = dict(self.counts), self.total
        for value, share in zip(values, shares, strict=True):
            if not (abs(value) <= self.bound and 0 <= share <= 1):
                raise ValueError(f"wanted a value in ±{self.bound:g} and a weight in [0, 1], got {value} and {share}")
            # What is a bin's edge but for rounding belongs to the bin above.
            place = min(NUM_BINS - 1, math.floor((value / self.bound + 1) / 2 * NUM_BINS + 1e-9))
            total += share * value
            if share > 0:
                counts[place] = counts.get(place, 0.0) + share
        return self.model_copy(update={"counts": dict(sorted(counts.items())), "total": total})

    @property
    def mean(self) -> float:
        """Of the values so far; 0 without any."""
        return self.total / self.weight if self.counts else 0.0

    @property
    def weight(self) -> float:
        """Of all values together: how many whole ones they amount to."""
        return sum(self.counts.values())

    def log_wealth(self, mean: float = 0.0) -> float:
        """Return the log of what betting on a mean above `mean` has made of 1."""
        return float(log_wealth(log_growth(self._edges(), self._weights(), mean, self.bound)))

    def growth(self) -> Floats:
        """Return [B]: by how much the log of each bet on a mean above 0 has grown."""
        return log_growth(self._edges(), self._weights(), 0.0, self.bound)

    def lower(self, alpha: float) -> float:
        """Return the bound that the mean is above; wrong at any look with a chance of at most `alpha`."""
        return _lower(self._edges(), self._weights(), self.bound, alpha)

    def upper(self, alpha: float) -> float:
        """Return the bound that the mean is below; wrong at any look with a chance of at most `alpha`."""
        return -_lower(-self._edges() - 2 * self.bound / NUM_BINS, self._weights(), self.bound, alpha)

    def _edges(self) -> Floats:
        return self.bound * (2 * np.array(list(self.counts), dtype=np.float64) / NUM_BINS - 1)

    def _weights(self) -> Floats:
        return np.array(list(self.counts.values()), dtype=np.float64)


def _lower(values: Floats, weights: Floats, bound: float, alpha: float) -> float:
    """Return the smallest mean that the wealth is below 1 / alpha at; the larger the mean, the smaller the wealth."""
    low, high, wanted = -bound, bound, -math.log(alpha)
    while high - low > 1e-6 * bound:
        middle = (low + high) / 2
        low, high = (
            (middle, high) if log_wealth(log_growth(values, weights, middle, bound)) >= wanted else (low, middle)
        )
    return low


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
