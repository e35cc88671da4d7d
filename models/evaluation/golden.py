"""Reference outputs, and when another output counts as the same.

The reference is what the same engine build says without speculation. Greedy decoding is exact only as far as the
arithmetic is: a batch of another shape adds in another order, and where the two best tokens are nearly tied the choice
flips. So an output passes when it is equal, or first differs at such a tie. The threshold is fixed beforehand from runs
without speculation at several batch sizes, never from the outputs that are judged.
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from models.params import Frozen

FILE = "golden.json"
# Gap below which a tie counts as near even if no run without speculation flipped there.
LEAST_THRESHOLD = 1e-3
# What a float32 log-softmax may add to a gap: bfloat16 logits lie on a grid, so a gap often is the threshold itself.
ROUNDING = 1e-5


class Golden(Frozen):
    """A prompt and its reference output.

    Attributes:
        gaps: log-probability of the best token minus the second's, at each position.
    """

    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    gaps: tuple[float, ...]


def equal_output(
    golden: Golden, token_ids: Sequence[int], threshold: float
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
    for position, (wanted, got) in enumerate(zip(reference, token_ids, strict=False)):
        if wanted != got:
            return position
    return None if len(reference) == len(token_ids) else min(len(reference), len(token_ids))


def near_tie_threshold(golden: Sequence[Golden], reruns: Sequence[Sequence[Sequence[int]]]) -> float:
    """Fix the threshold from runs of the reference's prompts at other batch sizes.

    Args:
        golden: the reference.
        reruns: for each batch size the outputs, in the order of `golden`; none of them speculated.

    Returns:
        twice the largest gap at which a rerun parted from the reference, at least `LEAST_THRESHOLD`.
    """
    gaps = [0.0]
    for outputs in reruns:
        for reference, token_ids in zip(golden, outputs, strict=True):
            position = first_difference(reference.token_ids, token_ids)
            if position is not None and position < len(reference.gaps):
                gaps.append(reference.gaps[position])
    return max(LEAST_THRESHOLD, 2 * max(gaps))


def save_golden(directory: Path, golden: Sequence[Golden], threshold: float) -> None:
    """Write golden.json beside a target's weights."""
    rows = [{**row.model_dump(), "gaps": [gap if math.isfinite(gap) else None for gap in row.gaps]} for row in golden]
    text = json.dumps({"threshold": threshold, "outputs": rows}, allow_nan=False)
    (directory / FILE).write_text(text + "\n")


def load_golden(directory: Path) -> tuple[list[Golden], float]:
    """Read golden.json.

    Raises:
        ValueError: the directory has none.
    """
    file = directory / FILE
    if not file.is_file():
        raise ValueError(f"target {directory} has no {FILE}; register it through flow build")
    content = json.loads(file.read_text())
    rows = [
        Golden(**{**row, "gaps": tuple(math.inf if gap is None else gap for gap in row["gaps"])})
        for row in content["outputs"]
    ]
    return rows, float(content["threshold"])
