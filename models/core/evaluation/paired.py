"""Two drafts on the same conversations: their scores, paired, and what each cluster of conversations says.

Conversations that resemble each other, such as those of one template, are one cluster: they say the same thing many
times, so that a cluster counts as one observation. It weighs differently in two questions. What does the traffic gain?
There a cluster weighs as many requests as it stands for, else what is asked once would say as much as what is asked
all day. Is there a gain at all? There it counts once among its domain's: a bet on it may lose its whole stake whatever
it weighs, so that a few heavy ones would make a window of many clusters say no more than one of those few.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from pydantic import Field

from models.core.evaluation.acceptance import CONFIDENCE, Floats
from models.types import Estimate, Frozen

HEAVIEST = 10  # median clusters that one cluster counts as at most, so that one flood can't stop a test
CUT = 0.2  # share of the traffic that the heaviest clusters may lose


class Score(Frozen):
    """One conversation as one draft would have served it.

    Attributes:
        cluster: conversations of one cluster resemble each other and count together; "" is a cluster of its own.
        weight: requests that it stands for beside the others of its domain: more than 1 where its group has more
            than are scored.
        steps: verification steps.
        accepted: tokens accepted in them: would-be accepted ones (greedy) or the expected number, Σ min(p, q)
            (sampled).
        tokens: of the answer, without the first, which is never drafted.
        covered: those of them that the draft's vocabulary has; the others are certain to be rejected.
    """

    id: str
    domain: str
    cluster: str = ""
    weight: float = Field(1.0, gt=0, allow_inf_nan=False)
    steps: int = Field(ge=1)
    accepted: float = Field(ge=0, allow_inf_nan=False)
    tokens: int = Field(0, ge=0)
    covered: int = Field(0, ge=0)


class Clusters(NamedTuple):
    """A window's clusters: [C] differences in accepted tokens a step, shares of the traffic (sum 1), and weights.

    Weights, in (0, 1], are what each counts as in the test. They don't depend on any score.
    """

    differences: Floats
    shares: Floats
    weights: Floats


def clusters(
    champion: Sequence[Score], challenger: Sequence[Score], shares: Mapping[str, float] | None = None
) -> Clusters:
    """Return each cluster's difference, its share of the traffic, and its weight in the test; see `Evidence.after`.

    A domain's share of the traffic is shared out among its conversations here by their weights, and a cluster has those
    of its conversations. In the test it is shared out among the domain's clusters, evenly. The test counts no cluster
    more than once, so that clusters of a domain with few are cut there: the largest one counts as `HEAVIEST` median
    ones at most, and `CUT` of the traffic may be lost by those above the others. What the test bounds is the gain of
    the clusters of the traffic that is left.
    """
    pairs = paired(champion, challenger)
    domains = [before.domain for before, _ in pairs]
    if shares is not None and (missing := sorted({domain for domain in domains if not shares.get(domain, 0) > 0})):
        raise ValueError(f"wanted a share of traffic above 0 of each domain, none of: {', '.join(missing)}")
    sizes, names = dict.fromkeys(domains, 0.0), {domain: set[str]() for domain in domains}
    for before, _ in pairs:
        sizes[before.domain] += before.weight
        names[before.domain].add(cluster_of(before))
    of_domain = sizes if shares is None else shares
    sums: dict[str, Floats] = defaultdict(lambda: np.zeros(3))  # share, share · difference, share in the test
    for before, after in pairs:
        difference = after.accepted / after.steps - before.accepted / before.steps
        share = of_domain[before.domain] * before.weight / sizes[before.domain]
        sums[cluster_of(before)][:2] += share, share * difference
    for domain, within in names.items():
        for name in within:
            sums[name][2] += of_domain[domain] / len(within)
    totals, weighted, once = np.array([sums[name] for name in sorted(sums)]).T
    return Clusters(weighted / totals, totals / totals.sum(), _counting_once(once))


def gain(found: Clusters) -> Estimate:
    """Return the traffic's mean difference in one window, with a 95% interval over clusters; it is for this one look.

    The variance is that of a weighted mean whose residuals are put back to their size, each by its own share of the
    mean (HC2, MacKinnon and White 1985); Student's t has as many degrees as the shares amount to equal clusters (Kish
    1965), less one. Of equal clusters that is the textbook's interval; a single one has none, and its ends are itself.
    """
    differences, shares, _ = found
    value = float((shares * differences).sum())
    if len(shares) < 2:
        return Estimate(value=value, low=value, high=value)
    squares = float((shares**2 * (differences - value) ** 2 / (1 - shares)).sum())
    degrees = max(1.0, 1 / float((shares**2).sum()) - 1)
    return within(value, math.sqrt(squares), degrees, (1 - CONFIDENCE) / 2)


def paired(first: Sequence[Score], second: Sequence[Score]) -> list[tuple[Score, Score]]:
    """Return each conversation's scores by both, in the first's order; ValueError names what the two don't agree in."""
    by_id = {score.id: score for score in second}
    if not first or len(by_id) < len(second) or len({score.id for score in first}) < len(first):
        raise ValueError("wanted at least one conversation, and each id once in a list")
    if unmatched := sorted({score.id for score in first} ^ by_id.keys()):
        raise ValueError(f"both drafts must score the same conversations; unmatched: {', '.join(unmatched[:5])}")
    pairs = [(before, by_id[before.id]) for before in first]
    for before, after in pairs:
        for key in ("domain", "cluster", "weight"):
            if (one := getattr(before, key)) != (other := getattr(after, key)):
                raise ValueError(f'conversation "{before.id}" is of {key} {one!r} and {other!r}')
    return pairs


def cluster_of(score: Score) -> str:
    """Return the name of a conversation's cluster, its own if it has none."""
    return f"cluster {score.cluster}" if score.cluster else f"conversation {score.id}"


def _counting_once(shares: Floats) -> Floats:
    """Scale [C] shares to weights of at most 1, with as much weight in all as `CUT` allows."""
    capped = np.minimum(shares, HEAVIEST * np.median(shares))
    capped /= capped.sum()
    low, high = 1 / float(capped.max()), len(capped) / (1 - CUT)
    for _ in range(50):  # what is left of the total only falls as the scale rises
        middle = (low + high) / 2
        left = float(np.minimum(1.0, middle * capped).sum()) / middle
        low, high = (middle, high) if left >= 1 - CUT else (low, middle)
    return np.asarray(np.minimum(1.0, low * capped))


def within(value: float, error: float, degrees: float, alpha: float) -> Estimate:
    """Return value ± t × error, each end wrong with a chance of `alpha`."""
    from scipy.special import stdtrit  # slow to import, and recipes are read by commands that judge nothing

    spread = float(stdtrit(degrees, 1 - alpha)) * error
    return Estimate(value=value, low=value - spread, high=value + spread)
