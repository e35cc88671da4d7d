"""Whether a draft and the engine that it runs in still are what they were: the same prompts, asked again now and then.

Traffic changes, these prompts don't, and decoding is greedy. Acceptance that falls on traffic alone is drift, and a
refresh answers it. Where it falls on both, the pair broke while it served: stale keys, spoiled weights. The gain on
the canary prompts is held against what the same draft showed on probation, as far as both outputs agree: past a near
tie they are other texts. Where K differs from then (fewer tokens drafted under load) the gains can't be compared.
"""

from collections.abc import Mapping, Sequence
from enum import Enum
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from pydantic import Field

from models.core.evaluation.acceptance import AcceptanceCount
from models.core.evaluation.golden import first_difference
from models.types import Frozen, Positive

# Fewer steps than this show no fall.
MIN_STEPS = 16


class Params(Frozen):
    """When the canary prompts are asked, and what counts as a fall.

    Attributes:
        period_s: seconds between two looks.
        max_in_flight: requests being answered above which a look waits, for one more period at most.
        timeout_s: seconds that a look may take; after that it says nothing.
        fall: share of the gain over 1.0 whose loss counts as a fall, on the canary prompts and on traffic.
        num_requests: the last requests that traffic is measured by; with fewer it is not.
    """

    period_s: Positive = 600.0
    max_in_flight: int = Field(default=4, ge=0)
    timeout_s: Positive = 120.0
    fall: float = Field(default=0.3, gt=0, lt=1)
    num_requests: int = Field(default=32, ge=1)


class Finding(Enum):
    """What a look found.

    Attributes:
        SOUND: the canary prompts are answered as before.
        FELL: less is accepted on them, and not on traffic; nothing follows but that it is said.
        PAIR: less is accepted on both, or the draft changes the output: speculation can't be relied on.
        TARGET: the target alone parts from its reference too.
    """

    SOUND = "sound"
    FELL = "fell"
    PAIR = "pair"
    TARGET = "target"


class Answer(NamedTuple):
    """A canary prompt's output, and the tokens drafted and accepted in each of its steps."""

    token_ids: tuple[int, ...]
    drafted: tuple[int, ...]
    accepted: tuple[int, ...]


def lost_on_canaries(reference: Sequence[Answer], answers: Sequence[Answer]) -> float | None:
    """Return which share of the gain shown on probation is missing now on the same prompts, negative if there is more.

    None where too little was drafted, or not as many tokens a step as then, to say.
    """
    sums = np.zeros((2, 3))
    for then, now in zip(reference, answers, strict=False):
        parts = first_difference(then.token_ids, now.token_ids)
        alike = len(then.token_ids) if parts is None else parts
        sums += [_steps(then, alike), _steps(now, alike)]
    (steps, accepted, drafted), (steps_now, accepted_now, drafted_now) = sums.tolist()
    if min(steps, steps_now) < MIN_STEPS or not accepted or drafted_now * steps < 0.9 * drafted * steps_now:
        return None
    return 1 - (accepted_now / steps_now) / (accepted / steps)


def lost_on_traffic(promised: Mapping[str, float], tallies: Sequence[AcceptanceCount], params: Params) -> float | None:
    """Return which share of the promised gain is missing on the last requests, negative if there is more.

    A domain that τ at the gate, `promised`, does not name is held against the best of these. Requests began with
    the draft, the oldest first; None where there are too few, or nothing was promised.
    """
    last = tallies[-params.num_requests :]
    most = max(promised.values(), default=1.0)
    wanted = sum(one.steps * (promised.get(one.domain, most) - 1) for one in last)
    if len(last) < params.num_requests or wanted <= 0:
        return None
    return 1 - sum(one.accepted for one in last) / wanted


def has_fallen(lost: float | None, params: Params) -> bool:
    """Whether a loss counts as a fall."""
    return lost is not None and lost > params.fall


def judge(on_canaries: float | None, on_traffic: float | None, params: Params) -> Finding:
    """Return what the two losses say together; see `Finding`."""
    if not has_fallen(on_canaries, params):
        return Finding.SOUND
    return Finding.PAIR if has_fallen(on_traffic, params) else Finding.FELL


def _steps(answer: Answer, num_tokens: int) -> tuple[int, int, int]:
    """Count the steps that begin within an output's first tokens: steps, accepted, drafted tokens."""
    begins = accumulate((accepted + 1 for accepted in answer.accepted), initial=1)
    steps = sum(position < num_tokens for position, _ in zip(begins, answer.accepted, strict=False))
    return steps, sum(answer.accepted[:steps]), sum(answer.drafted[:steps])
