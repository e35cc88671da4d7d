"""How well a language model says text: nats a token, document by document, so that differences get intervals."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from transformers import PreTrainedModel

from models.core.learning.training import IGNORED, cut, pad


class Likelihood(NamedTuple):
    """What a model said of one document."""

    nats: float
    num_tokens: int


@torch.no_grad()
def score(
    model: PreTrainedModel, documents: Sequence[Sequence[int]], max_length: int = 256, batch_size: int = 16
) -> list[Likelihood]:
    """Score each document but the first token of each piece; ValueError if one has fewer than two tokens."""
    short = next((number for number, document in enumerate(documents) if len(document) < 2), None)
    if short is not None or not documents:
        raise ValueError(f"document {short} has fewer than two tokens" if documents else "there are no documents")
    model.eval()
    pieces = [(number, piece) for number, document in enumerate(documents) for piece in cut([document], max_length)]
    nats, counts = [0.0] * len(documents), [0] * len(documents)
    pieces.sort(key=lambda one: len(one[1]))
    for start in range(0, len(pieces), batch_size):
        chunk = pieces[start : start + batch_size]
        batch = pad([piece for _, piece in chunk])
        labels = batch.labels[:, 1:].to(model.device)
        logits = model(input_ids=batch.token_ids.to(model.device), use_cache=False).logits[:, :-1].float()
        losses = torch.nn.functional.cross_entropy(
            logits.transpose(1, 2), labels, ignore_index=IGNORED, reduction="none"
        )
        for (number, _), row, wanted in zip(chunk, losses, labels, strict=True):
            nats[number] += float(row.sum())
            counts[number] += int((wanted != IGNORED).sum())
    return [Likelihood(*one) for one in zip(nats, counts, strict=True)]


def nats_per_token(scores: Sequence[Likelihood]) -> float:
    """Return the mean over all tokens, so that a long document counts for more."""
    return sum(one.nats for one in scores) / sum(one.num_tokens for one in scores)


def perplexity(scores: Sequence[Likelihood]) -> float:
    """Return e to the mean nats a token."""
    return math.exp(nats_per_token(scores))
