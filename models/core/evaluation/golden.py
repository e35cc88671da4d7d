"""Reference outputs, and when another output counts as the same.

The reference is what the same engine build says without speculation. Greedy decoding is exact only as far as the
arithmetic is: a batch of another shape adds in another order, and where the two best tokens are nearly tied the choice
flips. So an output passes when it is equal, or first differs at such a tie. The threshold is fixed beforehand from runs
without speculation in several batches, never from the compared outputs: by how much a batch changes any gap, not
only those of the few tokens that flip there.
"""

import json
import math
from collections.abc import Iterator, Sequence
from itertools import chain, starmap, zip_longest
from pathlib import Path
from typing import Literal, Protocol

from models.types import Frozen

FILE = "golden.json"
# Gap below which a tie counts as near even if no gap changed from batch to batch.
LEAST_THRESHOLD = 1e-3
MARGIN = 1.5
# What a float32 log-softmax may add to a gap: bfloat16 logits lie on a grid, so a gap often is the threshold itself.
ROUNDING = 1e-5


class Answer(Protocol):
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
    golden: Answer, token_ids: Sequence[int], threshold: float
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


def near_tie_threshold(golden: Sequence[Golden], reruns: Sequence[Sequence[Answer]]) -> float:
    """Fix the threshold from runs of the reference's prompts in other batches, none of them speculated.

    A token can flip where its gap is no larger than what a batch changes. Some thousand positions are looked at
    here, and outputs are compared at a million; of so many normal changes the largest is 1.4 times as large. So it is
    `MARGIN` times the largest change of a gap, up to where a rerun parts from the reference, at least
    `LEAST_THRESHOLD`.
    """
    pairs = chain.from_iterable(zip(golden, answers, strict=True) for answers in reruns)
    changes = chain.from_iterable(starmap(_changes, pairs))
    return max(LEAST_THRESHOLD, MARGIN * max(changes, default=0.0))


def _changes(reference: Golden, answer: Answer) -> Iterator[float]:
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
    (directory / FILE).write_text(text + "\n")


def load_golden(directory: Path) -> tuple[list[Golden], float]:
    """Read golden.json; ValueError if the directory has none."""
    file = directory / FILE
    if not file.is_file():
        raise ValueError(f"target {directory} has no {FILE}; register it through flow build")
    content = json.loads(file.read_text())
    for row in content["outputs"]:
        row["gaps"] = [math.inf if gap is None else gap for gap in row["gaps"]]
    return [Golden(**row) for row in content["outputs"]], float(content["threshold"])
