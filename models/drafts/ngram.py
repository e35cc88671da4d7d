"""Prompt lookup, nothing learnt: find where the last n tokens stood before, and draft what followed them there.

The longest n that occurs wins, and of its places the first, as in vLLM. A draft of this family is a config.json.
"""

from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from models.core.drafting.weightless import Format, TextDraft
from models.params import BaseParams

PAPER = "arXiv:2304.04487; github.com/apoorvumang/prompt-lookup-decoding"
ARCHITECTURES = ("NgramDraft",)
SERVED = True
FIXED_K = True


class Params(BaseParams):
    """What is looked up."""

    name: Literal["ngram"] = "ngram"
    min_tokens: int = Field(2, description="the fewest last tokens that are looked up.")
    max_tokens: int = Field(5, description="the most.")

    @model_validator(mode="after")
    def _sizes_fit(self) -> Self:
        if not 1 <= self.min_tokens <= self.max_tokens:
            raise ValueError(f"wanted 1 ≤ min_tokens ≤ max_tokens; got {self.min_tokens} and {self.max_tokens}")
        return self


class Ngram(TextDraft):
    params: Params

    def follow(self, token_ids: list[int], num_tokens: int) -> list[int]:
        return look_up(token_ids, num_tokens, self.params)


def look_up(token_ids: list[int], num_tokens: int, params: Params) -> list[int]:
    """Return at most `num_tokens` tokens that followed the longest known ending of `token_ids`."""
    tokens = np.asarray(token_ids)
    for size in range(min(params.max_tokens, len(tokens) - 1), params.min_tokens - 1, -1):
        windows = np.lib.stride_tricks.sliding_window_view(tokens[:-1], size)
        places = np.flatnonzero((windows == tokens[-size:]).all(axis=1))
        if len(places):
            start = int(places[0]) + size
            return [int(token) for token in tokens[start : start + num_tokens]]
    return []


_format = Format("ngram", ARCHITECTURES, Params, Ngram)
create, renew, save, load, check = _format.create, _format.renew, _format.save, _format.load, _format.check
vllm_weights = _format.vllm_weights


def vllm_config(directory: Path) -> dict[str, Any]:
    params = _format.read(directory)["ngram"]
    return {"method": "ngram", "prompt_lookup_min": params["min_tokens"], "prompt_lookup_max": params["max_tokens"]}
