"""Vocabulary: the embedding and the output matrix lose the tokens that the traffic does not use.

Kept are the most frequent tokens of the documents, as FR-Spec and EAGLE-3 choose a draft's vocabulary, and in any case
the special tokens that the configs name. Those drafts lose rows of the output matrix only, since they still read the
target's tokens; a language model of its own loses the same rows of its embedding and is that much smaller.

The tokenizer is not changed, and so does not fit any more: token i of the new model is token `kept_tokens[i]` of the
old one, a list that the config holds under "redraft" (of the first one, where a vocabulary is cut twice). Ids go in
through `narrow` and out through the list. Text with another token can't be read, and an engine that takes a draft's ids
for the target's, as vLLM does with draft models, can't serve it.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Literal

import numpy as np
from pydantic import Field
from transformers import PreTrainedModel

from models.core.checkpoints.invariants import note
from models.core.checkpoints.loading import choose_vocabulary
from models.core.layers.reshape import Kept, take_widths
from models.params import BaseParams, TrainingParams
from models.shrink import shape_of

PAPER = "arXiv:2502.14856, section 3 (FR-Spec)"
KEEPS_TOKENS = False
_SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id")


class Params(BaseParams):
    """How many tokens stay."""

    name: Literal["vocabulary"] = "vocabulary"
    vocab_size: int = Field(ge=1, description="tokens that stay, the most frequent ones.")


def shrink(
    model: PreTrainedModel, documents: Sequence[Sequence[int]], params: Params, training: TrainingParams, seed: int = 0
) -> PreTrainedModel:
    """Return a model of the special tokens and those that documents hold most often; see `models.shrink`."""
    shape_of(model)
    size, special = model.config.vocab_size, _special(model.config) | _special(model.generation_config)
    if not len(special) < params.vocab_size < size:
        raise ValueError(
            f"vocab_size must be {len(special) + 1} to {size - 1}, more than the special tokens and less than the "
            f"model's; got {params.vocab_size}"
        )
    counts = count_tokens(documents, size).astype(np.float64)
    counts[sorted(special)] = np.inf
    kept = choose_vocabulary(counts, params.vocab_size)
    shrunk = take_widths(model, Kept(tokens=kept))
    place = {token: number for number, token in enumerate(kept.tolist())}
    for config in (shrunk.config, shrunk.generation_config):
        for key in _SPECIAL:
            value = getattr(config, key, None)
            if value is not None:
                setattr(config, key, [place[token] for token in value] if isinstance(value, list) else place[value])
    before = getattr(model.config, "redraft", {}).get("kept_tokens", range(size))
    note(shrunk, "kept_tokens", [before[token] for token in kept.tolist()])
    return shrunk


def count_tokens(documents: Iterable[Sequence[int]], size: int) -> np.ndarray:
    """Return [V] how often each token occurs; ValueError if there are no tokens, or ids that are not below `size`."""
    tokens = np.fromiter((token for document in documents for token in document), dtype=np.int64)
    if not len(tokens) or tokens.min() < 0 or tokens.max() >= size:
        found = f"{tokens.min()} to {tokens.max()}" if len(tokens) else "none"
        raise ValueError(f"documents must hold token ids of 0 to {size - 1}; got {found}")
    return np.bincount(tokens, minlength=size)


def narrow(token_ids: Sequence[int], kept: Sequence[int]) -> list[list[int]]:
    """Return the runs of tokens that a narrower vocabulary can read, in its ids: stretches between tokens not kept.
    `kept` is `kept_tokens` of the config. Empty stretches are left out."""
    place = {token: number for number, token in enumerate(kept)}
    runs: list[list[int]] = [[]]
    for token in token_ids:
        if token in place:
            runs[-1].append(place[token])
        else:
            runs.append([])
    return [run for run in runs if run]


def _special(config: Any) -> set[int]:
    found: set[int] = set()
    for key in _SPECIAL:
        value = getattr(config, key, None)
        found.update(value if isinstance(value, list) else [] if value is None else [value])
    return {token for token in found if token >= 0}
