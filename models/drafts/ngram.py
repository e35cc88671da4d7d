"""Prompt lookup, nothing learnt: find where the last n tokens stood before, and draft what followed them there.

The longest n that occurs wins, and of its places the first, as in vLLM. A draft of this family is a config.json.
"""

from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from models.drafts import (
    Draft,
    Draw,
    GoOn,
    KeepRows,
    Rows,
    Unrolled,
    check_config,
    made_for,
    read_config,
    write_config,
)
from models.params import BaseParams, validate
from models.proposal import Proposal
from models.targets import TargetCard, describe

PAPER = "arXiv:2304.04487; github.com/apoorvumang/prompt-lookup-decoding"
FAMILY = "ngram"
ARCHITECTURES = ("NgramDraft",)
TRAINED = False


class Params(BaseParams):
    """What is looked up.

    Attributes:
        min_tokens: the fewest last tokens that are looked up.
        max_tokens: the most.
    """

    name: Literal["ngram"] = "ngram"
    min_tokens: int = 2
    max_tokens: int = 5


class Ngram(Draft):
    """Looks up; there are no parameters."""

    def __init__(self, params: Params, config: dict[str, Any]) -> None:
        super().__init__()
        self.params, self.config = params, config

    @property
    def taps(self) -> tuple[int, ...]:
        """Nothing of the target is read."""
        return ()

    @property
    def vocabulary(self) -> Tensor:
        """All of the target's."""
        return torch.arange(self.config["vocab_size"])

    def unroll(self, rows: Rows, num_steps: int, keep: KeepRows | None = None) -> list[Unrolled]:
        """See `models.drafts.Draft`; a row whose tokens stood nowhere before does not run, and logits are 0 or −∞."""
        tokens = rows.token_ids.tolist()
        found = [
            look_up(tokens[sequence][: index + 2], num_steps, self.params)
            for sequence, index in zip(rows.sequence.tolist(), rows.index.tolist(), strict=True)
        ]
        running, drafted = torch.arange(len(found)), []
        for step in range(num_steps):
            running = running[torch.tensor([len(found[row]) > step for row in running.tolist()], dtype=torch.bool)]
            logits = torch.full((len(running), self.config["vocab_size"]), float("-inf"))
            for place, row in enumerate(running.tolist()):
                logits[place, found[row][step]] = 0.0
            drafted.append(Unrolled(running, logits))
            if keep is not None and step + 1 < num_steps:
                running = running[keep(step, running, logits)]
        return drafted

    def drafter(self, max_len: int) -> "_Drafter":
        """See `models.drafts.Draft`."""
        return _Drafter(self)


class _Drafter:
    """See `models.drafts.Drafter`."""

    def __init__(self, draft: Ngram) -> None:
        self.draft = draft
        self._token_ids: list[int] = []
        self._device = torch.device("cpu")

    def extend(self, token_ids: Tensor, hidden: Tensor) -> None:
        """See the base."""
        self._token_ids += token_ids.tolist()[1 if self._token_ids else 0 :]
        self._device = token_ids.device

    def propose(self, num_tokens: int, draw: Draw, go_on: GoOn | None = None) -> Proposal:
        """See the base."""
        return Proposal.chain(look_up(self._token_ids, num_tokens, self.draft.params), device=self._device)


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


def create(params: Params, target_dir: Path, token_counts: np.ndarray) -> Ngram:
    """Make a draft for a target.

    Args:
        params: what is looked up.
        target_dir: the target's directory.
        token_counts: not read.

    Raises:
        ValueError: the sizes are not 1 ≤ min ≤ max.
    """
    if not 1 <= params.min_tokens <= params.max_tokens:
        raise ValueError(f"wanted 1 ≤ min_tokens ≤ max_tokens; got {params.min_tokens} and {params.max_tokens}")
    card = describe(target_dir)
    config = {
        "architectures": list(ARCHITECTURES),
        "ngram": params.model_dump(),
        "vocab_size": card.vocab_size,
        "redraft": made_for(card),
    }
    return Ngram(params, config)


def renew(draft: Ngram, target_dir: Path, token_counts: np.ndarray) -> Ngram:
    """Return the draft as it is: it follows every prompt by itself."""
    return draft


def save(draft: Ngram, directory: Path) -> None:
    """Write config.json into `directory`."""
    write_config(draft.config, FAMILY, directory)


def load(directory: Path, target_dir: Path) -> Ngram:
    """Read a draft back; ValueError as `check`."""
    check(directory, like=None, target=describe(target_dir))
    config = read_config(directory, FAMILY, ARCHITECTURES)
    return Ngram(validate(Params, config["ngram"], f"draft {directory.name}"), config)


def check(directory: Path, like: Path | None, target: TargetCard) -> None:
    """Raise ValueError if the draft was made for another target, or differs from the served one `like`."""
    config = read_config(directory, FAMILY, ARCHITECTURES)
    check_config(config, directory, None if like is None else read_config(like, FAMILY, ARCHITECTURES), target)


def vllm_config(directory: Path) -> dict[str, Any]:
    """Return what vLLM's speculative_config says of this draft."""
    params = read_config(directory, FAMILY, ARCHITECTURES)["ngram"]
    return {"method": "ngram", "prompt_lookup_min": params["min_tokens"], "prompt_lookup_max": params["max_tokens"]}


def vllm_weights(directory: Path) -> None:
    """Return None: there is nothing to load."""
