"""Reference outputs, and when another output counts as the same.

The reference is what the same engine build says without speculation. Greedy decoding is exact only as far as the
arithmetic is: a batch of another shape adds in another order, and where the two best tokens are nearly tied the choice
flips. So an output passes when it is equal, or first differs at such a tie. The threshold is fixed beforehand from runs
without speculation in several batches, never from the compared outputs: by how much a batch changes any gap, not
only those of the few tokens that flip there.

Golden prompts are also asked again now and then, as canaries: whether a draft and the engine that it runs in still are
what they were. Traffic changes, these prompts don't, and decoding is greedy. Acceptance that falls on traffic alone is
drift, and a refresh answers it. Where it falls on both, the pair broke while it served: stale keys, spoiled weights.
The gain on the canary prompts is held against what the same draft showed on probation, as far as both outputs agree:
past a near tie they are other texts. Where K differs from then (fewer tokens drafted under load) the gains can't be
compared.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from itertools import accumulate, chain, starmap, zip_longest
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

import numpy as np
from pydantic import Field

from models.core.evaluation.acceptance import AcceptanceCount
from models.types import Frozen, Positive

GOLDEN_FILE = "golden.json"
# Gap below which a tie counts as near even if no gap changed from batch to batch.
LEAST_THRESHOLD = 1e-3
MARGIN = 1.5
# What a float32 log-softmax may add to a gap: bfloat16 logits lie on a grid, so a gap often is the threshold itself.
ROUNDING = 1e-5
# Fewer steps than this show no fall.
MIN_STEPS = 16


class Output(Protocol):
    """An output and, at each position, the log-probability of its token minus the best other's."""

    @property
    def token_ids(self) -> tuple[int, ...]:
        """What was said."""

    @property
    def gaps(self) -> tuple[float, ...]:
        """One for each token."""


class Golden(Frozen):
    """A prompt and its reference output; gaps are the best token's log-probability minus the second's, by position."""

    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    gaps: tuple[float, ...]


def equal_output(
    golden: Output, token_ids: Sequence[int], threshold: float
) -> Literal["equal", "near-tie", "different"]:
    """Judge an output of the same prompt and the same token limit."""
    position = first_difference(golden.token_ids, token_ids)
    if position is None:
        return "equal"
    if position < len(golden.gaps) and golden.gaps[position] <= threshold + ROUNDING:
        return "near-tie"
    return "different"


def first_difference(reference: Sequence[int], token_ids: Sequence[int]) -> int | None:
    """Return where two outputs part; an output that ends early parts where it ends."""
    pairs = enumerate(zip_longest(reference, token_ids))
    return next((position for position, (wanted, got) in pairs if wanted != got), None)


def near_tie_threshold(golden: Sequence[Golden], reruns: Sequence[Sequence[Output]]) -> float:
    """Fix the threshold from runs of the reference's prompts in other batches, none of them speculated.

    A token can flip where its gap is no larger than what a batch changes. Some thousand positions are looked at
    here, and outputs are compared at a million; of so many normal changes the largest is 1.4 times as large. So it is
    `MARGIN` times the largest change of a gap, up to where a rerun parts from the reference, at least
    `LEAST_THRESHOLD`.
    """
    pairs = chain.from_iterable(zip(golden, answers, strict=True) for answers in reruns)
    changes = chain.from_iterable(starmap(_changes, pairs))
    return max(LEAST_THRESHOLD, MARGIN * max(changes, default=0.0))


def _changes(reference: Golden, answer: Output) -> Iterator[float]:
    """Say by how much the reference's token lost or won on the best other one, where the tokens before are the same."""
    told = zip(reference.token_ids, answer.token_ids, reference.gaps, answer.gaps, strict=False)
    for wanted, got, before, after in told:
        if math.isfinite(before) and math.isfinite(after):
            yield abs(before - after) if wanted == got else before + after
        if wanted != got:
            break


def save_golden(directory: Path, golden: Sequence[Golden], threshold: float) -> None:
    """Write golden.json beside a target's weights."""
    rows = [{**row.model_dump(), "gaps": [gap if math.isfinite(gap) else None for gap in row.gaps]} for row in golden]
    text = json.dumps({"threshold": threshold, "outputs": rows}, allow_nan=False)
    (directory / GOLDEN_FILE).write_text(text + "\n")


def load_golden(directory: Path) -> tuple[list[Golden], float]:
    """Read golden.json; ValueError if the directory has none."""
    file = directory / GOLDEN_FILE
    if not file.is_file():
        raise ValueError(f"target {directory} has no {GOLDEN_FILE}; register it through flow build")
    content = json.loads(file.read_text())
    for row in content["outputs"]:
        row["gaps"] = [math.inf if gap is None else gap for gap in row["gaps"]]
    return [Golden(**row) for row in content["outputs"]], float(content["threshold"])


class CanaryParams(Frozen):
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


def lost_on_traffic(
    promised: Mapping[str, float], tallies: Sequence[AcceptanceCount], params: CanaryParams
) -> float | None:
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


def has_fallen(lost: float | None, params: CanaryParams) -> bool:
    """Whether a loss counts as a fall."""
    return lost is not None and lost > params.fall


def judge(on_canaries: float | None, on_traffic: float | None, params: CanaryParams) -> Finding:
    """Return what the two losses say together; see `Finding`."""
    if not has_fallen(on_canaries, params):
        return Finding.SOUND
    return Finding.PAIR if has_fallen(on_traffic, params) else Finding.FELL


def _steps(answer: Answer, num_tokens: int) -> tuple[int, int, int]:
    """Count the steps that begin within an output's first tokens: steps, accepted, drafted tokens."""
    begins = accumulate((accepted + 1 for accepted in answer.accepted), initial=1)
    steps = sum(position < num_tokens for position, _ in zip(begins, answer.accepted, strict=False))
    return steps, sum(answer.accepted[:steps]), sum(answer.drafted[:steps])
