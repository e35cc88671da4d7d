"""The target's own words, many answers at a time and in plain torch, where starting an engine would cost more.

Texts of a batch are padded on the left, so that the next token of each is the last one's. An answer that has ended is
computed on until the batch has: texts that want as many tokens belong together.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

NO_STOPS: frozenset[int] = frozenset()  # an answer goes on past its end


class Ask(NamedTuple):
    """A text that waits for more.

    Attributes:
        token_ids: prompt, and what was answered so far, at least one token.
        num_tokens: the most that are wanted, from 1.
        temperature: at which they are drawn; 0 takes the likeliest.
    """

    token_ids: Sequence[int]
    num_tokens: int
    temperature: float = 0.0


@torch.inference_mode()
def go_on(
    model: PreTrainedModel,
    asks: Sequence[Ask],
    stops: frozenset[int],
    rng: torch.Generator,
    is_late: Callable[[], bool] = lambda: False,
) -> list[list[int]]:
    """Return how a model goes on with each text, up to and with a token that ends an answer.

    Args:
        model: any causal one.
        asks: of one batch.
        stops: tokens that end an answer.
        rng: on the model's device.
        is_late: asked before each token; if so, what was said so far is returned.

    Raises:
        ValueError: there is nothing to go on from, or nothing wanted.
    """
    for ask in asks:
        if not ask.token_ids or ask.num_tokens < 1:
            raise ValueError(f"wanted tokens to go on from and at least one more; got {len(ask.token_ids)} and {ask}")
    longest, device = max(len(ask.token_ids) for ask in asks), model.device
    padded = [[0] * (longest - len(ask.token_ids)) + [*ask.token_ids] for ask in asks]
    read = torch.tensor(padded, device=device)
    lengths = torch.tensor([len(ask.token_ids) for ask in asks], device=device)
    mask = (torch.arange(longest, device=device) >= longest - lengths[:, None]).long()
    places = (mask.cumsum(1) - 1).clamp(min=0)
    temperatures = torch.tensor([ask.temperature for ask in asks], device=device)
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
