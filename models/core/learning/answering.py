"""The target's own words, many answers at a time and in plain torch, where starting an engine would cost more.

Texts of a batch are padded on the left, so that the next token of each is the last one's. An answer that has ended is
computed on until the batch has: texts that want as many tokens belong together.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

NO_STOPS: frozenset[int] = frozenset()  # an answer goes on past its end


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
