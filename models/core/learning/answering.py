"""The target's own words, many answers at a time and in plain torch, where starting an engine would cost more.

Texts of a batch are padded on the left, so that the next token of each is the last one's. An answer that has ended is
computed on until the batch has: texts that want as many tokens belong together.

Answers that came from elsewhere may be unlike the target's own, which are all that a draft is asked to guess. A draft
that learns another author's words may gain on more of these and give nothing in service. So the target reads them and
says at each place how likely the token is to it that came, and how likely its own token would be on average:

    Σ_t (log p(x_t) − Σ_v p_T(v) log p(v)) / number of tokens

in nats a token, with p_T the target's law at the temperature that the row names, after the same words. Of the target's
own answers each term is 0 on average, whatever they say and however long they are. Log-probabilities alone would not
tell: people write what is easier to foresee than what a small target says at temperature 1, so that their words, which
it would not choose, are as likely as its own.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from models.core.evaluation.paired import within
from models.core.learning.hidden import Sample
from models.types import Estimate

NO_STOPS: frozenset[int] = frozenset()  # an answer goes on past its end
NUM_PROMPTS = 100
MOST_TOKENS = 64  # of an answer that are read
UNLIKE = -0.2  # nats a token
ALPHA = 0.05
BATCH = 16


class Ask(NamedTuple):
    """A text that waits for more."""

    token_ids: Sequence[int]  # prompt, and what was answered so far, at least one token
    num_tokens: int  # the most that are wanted, from 1
    temperature: float = 0.0  # at which they are drawn; 0 takes the likeliest


@torch.inference_mode()
def go_on(
    model: PreTrainedModel,
    asks: Sequence[Ask],
    stops: frozenset[int],
    rng: torch.Generator,
    is_late: Callable[[], bool] = lambda: False,
) -> list[list[int]]:
    """Return how a causal model goes on with each text of a batch, up to and with a token that ends an answer.

    `is_late` is asked before each token; if so, what was said so far is returned. `rng` is on the model's device.

    Raises:
        ValueError: there is nothing to go on from, or nothing wanted.
    """
    for ask in asks:
        if not ask.token_ids or ask.num_tokens < 1:
            raise ValueError(f"wanted tokens to go on from and at least one more; got {len(ask.token_ids)} and {ask}")
    texts = [torch.tensor(ask.token_ids) for ask in asks]
    read = pad_sequence(texts, True, padding_side="left").to(model.device)
    mask = pad_sequence([torch.ones_like(text) for text in texts], True, padding_side="left").to(model.device)
    places = (mask.cumsum(1) - 1).clamp(min=0)
    temperatures = torch.tensor([ask.temperature for ask in asks], device=model.device)
    said: list[list[int]] = [[] for _ in asks]
    going, cache = set(range(len(asks))), None
    while going and not is_late():
        output = model(
            input_ids=read, attention_mask=mask, position_ids=places, past_key_values=cache, use_cache=True,
            logits_to_keep=1,
        )  # fmt: skip
        cache, tokens = output.past_key_values, _draw(output.logits[:, -1].float(), temperatures, rng)
        for row, token in enumerate(tokens.tolist()):
            if row in going:
                said[row].append(token)
                if token in stops or len(said[row]) == asks[row].num_tokens:
                    going.discard(row)
        read, places = tokens[:, None], places[:, -1:] + 1
        mask = torch.cat([mask, torch.ones_like(read)], dim=1)
    return said


def _draw(logits: Tensor, temperatures: Tensor, rng: torch.Generator) -> Tensor:
    """[B, V], [B] → [B] the likeliest token, or one drawn at the row's temperature."""
    laws = (logits / temperatures.clamp(min=1e-3)[:, None]).softmax(-1)
    drawn = torch.multinomial(laws, 1, generator=rng)[:, 0]
    return torch.where(temperatures > 0, drawn, logits.argmax(-1))


def difference(excess: Sequence[float], lengths: Sequence[int]) -> Estimate:
    """Return how much likelier answers are to the target than its own at the same places, by Student's t over answers.

    `excess` [N] is of each answer the sum of nats above what its tokens would have on average (`excess_log_probs`),
    `lengths` [N] the number of its tokens. The difference is in nats a token; each end is wrong with a chance of
    `ALPHA`. Of one answer nothing is known. ValueError if there are no answers, or another number of lengths.
    """
    if not excess or len(excess) != len(lengths):
        raise ValueError(f"wanted answers with their lengths, got {len(excess)} answers and {len(lengths)} lengths")
    sums, tokens = np.array(excess, dtype=np.float64), np.array(lengths, dtype=np.float64)
    value, num = float(sums.sum() / tokens.sum()), len(sums)
    if num == 1:
        return Estimate(value=value, low=-math.inf, high=math.inf)
    rest = (sums - value * tokens) / tokens.mean()
    return within(value, float(np.sqrt((rest**2).sum() / (num - 1) / num)), num - 1, ALPHA)


def unlike(found: Estimate) -> bool:
    """Whether answers are shown to be unlike the target's: the one-sided 95% upper bound is below `UNLIKE`."""
    return found.high < UNLIKE


def compare(model: PreTrainedModel, samples: Sequence[Sample]) -> Estimate:
    """Return how much likelier answers from elsewhere are to a target than its own, by their first tokens."""
    cut = [one._replace(completion_ids=one.completion_ids[:MOST_TOKENS]) for one in samples]
    return difference(excess_log_probs(model, cut), [len(one.completion_ids) for one in cut])


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
def excess_log_probs(model: PreTrainedModel, samples: Sequence[Sample]) -> list[float]:
    """Return of each answer the sum of its tokens' log-probabilities less what those of the model's own would have."""
    found = []
    for sample in samples:
        said = torch.tensor(sample.completion_ids, device=model.device)
        read = torch.tensor([sample.token_ids], device=model.device)
        logits = model(input_ids=read, use_cache=False, logits_to_keep=len(said) + 1).logits[0, :-1].float()
        told = logits.log_softmax(-1)
        law = (logits / sample.temperature).softmax(-1) if sample.temperature > 0 else None
        own = told.amax(-1) if law is None else (law * told).sum(-1)
        found.append(float((told.gather(-1, said[:, None])[:, 0] - own).sum()))
    return found
