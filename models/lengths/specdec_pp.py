"""SpecDec++: draft on until it is likely enough that the target will reject one of the step's tokens.

A head says of each drafted token how likely it is to be accepted, given that those before it are. With these chances a₁
to aₖ of the step so far, the draft stops as soon as

    1 − a₁ a₂ … aₖ > h

which is the best policy, with an h that follows from what passes of the draft and of the target take (the paper's
theorem).

The paper's head reads the draft's last hidden state, and learns from tokens that follow others of the draft's own. This
one reads what the draft said, so that it fits each family that is asked whether to go on; and it learns from tokens
that follow accepted ones alone, which are all that the product asks about.
"""

import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from models.core.learning import binary_head
from models.core.learning.hidden import Sample, hidden_states, length_buckets, pack
from models.drafts import Draft, Rows, confidence
from models.lengths import View, all_tokens
from models.params import BaseParams
from models.types import MIN_COMPLETION

PAPER = "arXiv:2405.19715"
FILE = "acceptance.safetensors"
NUM_BEST, FLOOR = 8, -20.0  # likeliest tokens whose log-probabilities are read, which are cut there
NUM_FEATURES = NUM_BEST + 3
FITS = ("num_layers", "rejection_weight")


class Params(BaseParams):
    """When to stop, and by which head.

    Attributes:
        head: a file that `fit` wrote; without one the draft's highest probability is taken for the chance.
        threshold: h; 1 never stops.
        num_layers: residual layers of a head that is fit.
        rejection_weight: how much more than an acceptance a rejection counts while it is.
    """

    name: Literal["specdec_pp"] = "specdec_pp"
    head: Path | None = None
    threshold: float = Field(0.7, ge=0, le=1)
    num_layers: int = Field(3, ge=0)
    rejection_weight: float = Field(6.0, gt=0)


num_draft_tokens = all_tokens  # `go_on` ends a step


def estimate(logits: Tensor, index: int, place: int, params: Params) -> float:
    """Return how likely the token that was drafted last, `index` of logits [D] at temperature 1, is to be accepted.

    `place` tokens were drafted before it in the step. ValueError if the head's file is missing, or for something else.
    """
    if params.head is None:
        return confidence(logits)
    head = binary_head.load(params.head, NUM_FEATURES)
    drafted = torch.tensor([index], device=logits.device)
    return float(head(_features(logits[None], drafted, place).cpu()).sigmoid())


def go_on(view: View, params: Params) -> bool:
    """Return whether it is likely enough, by `estimate` of each of them, that no token of the step is rejected."""
    return 1 - math.prod(view.confidences) <= params.threshold


def fit(
    draft: Draft,
    target_dir: Path,
    samples: Sequence[Sample],
    num_draft_tokens: int,
    work_dir: Path,
    params: Params,
    seed: int,
) -> Params:
    """Fit the head to what a draft is accepted for, as serving greedy answers would show; see `models.lengths`.
    ValueError if no answer has more than two tokens, or what the draft says does not follow from the text."""
    samples = [sample for sample in samples if len(sample.completion_ids) >= MIN_COMPLETION]
    if not samples:
        raise ValueError("specdec_pp: no sample has an answer of more than two tokens to fit a head to")
    states, features, labels = hidden_states(draft, target_dir, samples, work_dir), [], []
    with torch.no_grad():
        for batch in length_buckets(samples, 2048):
            rows, _, _, lengths = pack(batch, states, num_draft_tokens, draft)
            accepted = partial(_accepted, rows, lengths[rows.sequence] - 1, draft.vocabulary)
            for step, (running, logits, *_) in enumerate(draft.unroll(rows, num_draft_tokens, accepted)):
                features.append(_features(logits, logits.argmax(-1), step))
                labels.append(accepted(step, running, logits))
    head = binary_head.fit(
        torch.cat(features).cpu(), torch.cat(labels).float().cpu(), params.num_layers, params.rejection_weight, seed
    )
    binary_head.save(head, work_dir / FILE)
    return params.model_copy(update={"head": work_dir / FILE})


def _accepted(rows: Rows, last: Tensor, vocabulary: Tensor, step: int, running: Tensor, logits: Tensor) -> Tensor:
    """[n] whether the target says the drafted token; past an answer's last token [N] it does not."""
    index = rows.index[running] + 2 + step
    came = rows.token_ids[rows.sequence[running], index]
    return (index <= last[running]) & (vocabulary[logits.argmax(-1)] == came)


def _features(logits: Tensor, drafted: Tensor, place: int) -> Tensor:
    """[n, D] logits, [n] which were drafted → [n, F]: the best log-probabilities, the drafted one's, entropy, place."""
    log_probs = logits.float().log_softmax(-1)
    best = log_probs.topk(min(NUM_BEST, logits.shape[-1])).values.clamp(min=FLOOR)
    best = torch.nn.functional.pad(best, (0, NUM_BEST - best.shape[1]), value=FLOOR)
    entropy = torch.special.entr(log_probs.exp()).sum(dim=-1, keepdim=True)
    own = log_probs.gather(1, drafted[:, None]).clamp(min=FLOOR)
    return torch.cat([best, own, entropy, torch.full_like(own, place)], dim=1)
