"""Whether answers that came from elsewhere are like the target's own, which are all that a draft is asked to guess.

A draft that learns another author's words may gain on more of these and give nothing in service. So the target answers
some of the prompts itself, at the temperature that each row names, and both answers are scored by what the target says
of them: the mean log-probability of a token, in nats, at temperature 1. Both are read up to so many tokens, and no
further than where the answer from elsewhere was cut off: an answer of the target's own then differs from another one by
chance alone. The difference is paired prompt by prompt.
"""

import math
from collections.abc import Collection, Sequence

import numpy as np
import torch
from transformers import PreTrainedModel

from models.core.evaluation.paired import within
from models.core.learning.answering import Ask, go_on
from models.core.learning.hidden import Sample
from models.types import Estimate

NUM_PROMPTS = 50
MOST_TOKENS = 64  # of an answer that are read
UNLIKE = -0.2  # nats a token
ALPHA = 0.05
BATCH = 16


def difference(imported: Sequence[float], own: Sequence[float]) -> Estimate:
    """Return how much likelier imported answers are to the target than its own, by Student's t over prompts.

    Both are [N] the mean log-probability of a token of each answer, to the same prompts. The difference is in nats a
    token; each end is wrong with a chance of `ALPHA`. Of one prompt nothing is known. ValueError if there are no
    answers, or not as many of one kind as of the other.
    """
    if not imported or len(imported) != len(own):
        raise ValueError(f"wanted answers in pairs, got {len(imported)} imported and {len(own)} of the target's own")
    differences = np.array(imported, dtype=np.float64) - np.array(own, dtype=np.float64)
    value, num = float(differences.mean()), len(differences)
    if num == 1:
        return Estimate(value=value, low=-math.inf, high=math.inf)
    return within(value, float(differences.std(ddof=1)) / math.sqrt(num), num - 1, ALPHA)


def unlike(found: Estimate) -> bool:
    """Whether answers are shown to be unlike the target's: the one-sided 95% upper bound is below `UNLIKE`."""
    return found.high < UNLIKE


def read_of(sample: Sample, stops: Collection[int]) -> int:
    """Return how many tokens of an answer, and of another one to its prompt, are compared."""
    return MOST_TOKENS if sample.completion_ids[-1] in stops else min(len(sample.completion_ids), MOST_TOKENS)


def compare(
    model: PreTrainedModel, samples: Sequence[Sample], stops: frozenset[int], max_len: int, rng: torch.Generator
) -> Estimate:
    """Return how much likelier answers from elsewhere, one to a prompt, are to a target than its own."""
    lengths = [read_of(sample, stops) for sample in samples]
    cut = [one._replace(completion_ids=one.completion_ids[:num]) for one, num in zip(samples, lengths, strict=True)]
    own = answer(model, cut, lengths, stops, max_len, rng)
    return difference(mean_log_probs(model, cut), mean_log_probs(model, own))


def answer(
    model: PreTrainedModel,
    samples: Sequence[Sample],
    lengths: Sequence[int],
    stops: frozenset[int],
    max_len: int,
    rng: torch.Generator,
) -> list[Sample]:
    """Return the samples with answers of the model's own, of at most so many tokens, each at its own temperature."""
    said: dict[int, list[int]] = {}
    asks = [
        Ask(one.prompt_ids, max(1, min(length, max_len - len(one.prompt_ids))), one.temperature)
        for one, length in zip(samples, lengths, strict=True)
    ]
    order = sorted(range(len(samples)), key=lambda place: (lengths[place], len(samples[place].prompt_ids)))
    for start in range(0, len(order), BATCH):
        batch = order[start : start + BATCH]
        said |= dict(zip(batch, go_on(model, [asks[place] for place in batch], stops, rng), strict=True))
    return [one._replace(completion_ids=said[place], rejected=None) for place, one in enumerate(samples)]


@torch.inference_mode()
def mean_log_probs(model: PreTrainedModel, samples: Sequence[Sample]) -> list[float]:
    """Return of each answer the mean log-probability of a token at temperature 1, given what is before it."""
    found = []
    for sample in samples:
        said = torch.tensor(sample.completion_ids, device=model.device)
        read = torch.tensor([sample.token_ids], device=model.device)
        logits = model(input_ids=read, use_cache=False, logits_to_keep=len(said) + 1).logits[0, :-1]
        told = logits.float().log_softmax(-1).gather(-1, said[:, None])
        found.append(float(told.mean()))
    return found
