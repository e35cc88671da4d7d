"""What a request draws its tokens from: the settings of `models.engines.Sampling`, on logits.

Letters: n rows, V vocabulary.
"""

import torch
from torch import Tensor

from models.engines import Sampling


def probabilities(logits: Tensor, sampling: Sampling) -> Tensor:
    """[n, V] logits → [n, V] what is sampled from: temperature, then the top_k best, then the smallest set of top_p.

    Raises:
        ValueError: the temperature is 0, which is no distribution but a choice.
    """
    if sampling.temperature <= 0:
        raise ValueError(f"temperature must be above 0 to sample; got {sampling.temperature}")
    logits = logits / sampling.temperature
    if 0 < sampling.top_k < logits.shape[-1]:
        least = logits.topk(sampling.top_k).values[..., -1:]
        logits = logits.masked_fill(logits < least, float("-inf"))
    probs = logits.softmax(-1)
    if sampling.top_p < 1:
        ordered, order = probs.sort(dim=-1, descending=True)
        dropped = ordered.cumsum(-1) - ordered >= sampling.top_p
        probs = torch.zeros_like(probs).scatter(-1, order, ordered.masked_fill(dropped, 0.0))
        probs = probs / probs.sum(-1, keepdim=True)
    return probs


def draw(logits: Tensor, sampling: Sampling, rng: torch.Generator) -> int:
    """[V] logits → an index."""
    if sampling.temperature == 0:
        return int(logits.argmax())
    return int(torch.multinomial(probabilities(logits[None].float(), sampling)[0], 1, generator=rng))
