"""REST: draft what followed the text's end in a store of other texts, as a tree of the commonest continuations.

The longest ending that the store holds is looked up, and the continuations of its places are merged into a tree, of
which the commonest beginnings are kept, as many as the budget allows. Unlike the paper's, a match never runs from one
text into the next, and of more than 5000 places the latest are looked at. With an empty store, or where it holds no
such ending, nothing is drafted. A build fills the store with the answers that it has for training. A refresh leaves it
as it is: what clients said can be erased, and must not live on in a draft.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import torch
from pydantic import Field, model_validator
from safetensors.torch import save_file

from models.core.checkpoints.loading import read_tensors
from models.core.drafting.lookup import Store
from models.core.drafting.proposal import Proposal
from models.core.drafting.weightless import Format, TextDraft, TextDrafter
from models.drafts import Draft, Draw, GoOn
from models.params import BaseParams
from models.targets import TargetCard, describe
from models.trees import merge

PAPER = "arXiv:2311.08252, section 3; github.com/FasterDecoding/REST"
ARCHITECTURES = ("RestDraft",)
SERVED = False
STORE = "store.safetensors"
TENSORS = {"token_ids", "lengths"}


class Params(BaseParams):
    """What is looked up."""

    name: Literal["rest"] = "rest"
    shortest: int = Field(2, ge=1, description="the fewest last tokens that are looked up.")
    longest: int = Field(16, ge=1, description="the most.")
    capacity: int = Field(200_000, ge=0, description="the most tokens that are stored, of the texts that come first.")

    @model_validator(mode="after")
    def _sizes_fit(self) -> Self:
        if self.shortest > self.longest:
            raise ValueError(f"wanted shortest ≤ longest; got {self.shortest} and {self.longest}")
        return self


class Rest(TextDraft):
    branches = True
    params: Params

    def __init__(self, params: Params, config: dict[str, Any]) -> None:
        super().__init__(params, config)
        self.store = Store([], params.shortest)

    def tree(self, token_ids: list[int], num_tokens: int) -> tuple[list[int], tuple[int, ...]]:
        """Return tokens and parents of at most `num_tokens` nodes after `token_ids`."""
        return merge(self.store.continuations(token_ids, self.params.longest, num_tokens), num_tokens)

    def follow(self, token_ids: list[int], num_tokens: int) -> list[int]:
        tokens, parents = self.tree(token_ids, num_tokens)
        branch, node = [], -1
        while node in parents:
            node = parents.index(node)
            branch.append(tokens[node])
        return branch

    def drafter(self, max_len: int) -> "_Drafter":
        return _Drafter(self)


class _Drafter(TextDrafter):
    draft: Rest

    def propose(self, num_tokens: int, draw: Draw, go_on: GoOn | None = None) -> Proposal:
        tokens, parents = self.draft.tree(self.known, num_tokens)
        return Proposal(torch.tensor([tokens], dtype=torch.int64, device=self.device), parents)


_format = Format("rest", ARCHITECTURES, Params, Rest)
create, renew = _format.create, _format.renew
vllm_config, vllm_weights = _format.vllm_config, _format.vllm_weights


def collect(draft: Rest, texts: Sequence[Sequence[int]]) -> None:
    """See `models.drafts.Collector`; texts beyond the capacity are left out, the first of them in part."""
    vocab_size, left = draft.config["vocab_size"], draft.params.capacity
    kept: list[list[int]] = []
    for text in texts:
        if outside := [token for token in text if not 0 <= token < vocab_size]:
            raise ValueError(f"token {outside[0]} is not one of the vocabulary, 0 to {vocab_size - 1}")
        if left and text:
            kept.append(list(text[:left]))
            left -= len(kept[-1])
    draft.store = Store(kept, draft.params.shortest)


def save(draft: Rest, directory: Path) -> None:
    """Write config.json and the store into `directory`."""
    _format.save(draft, directory)
    texts = draft.store.texts
    tokens = np.array([token for text in texts for token in text], np.int32)
    lengths = np.array([len(text) for text in texts], np.int32)
    save_file({"token_ids": torch.from_numpy(tokens), "lengths": torch.from_numpy(lengths)}, directory / STORE)


def load(directory: Path, target_dir: Path) -> Draft:
    """Read a draft back; ValueError as `check`."""
    check(directory, None, describe(target_dir))
    draft = _format.load(directory, target_dir)
    collect(draft, _read_texts(directory))
    return draft


def check(directory: Path, like: Path | None, target: TargetCard) -> None:
    """See `models.drafts.Family`; a store of any texts can be swapped in."""
    _format.check(directory, like, target)
    tokens = [token for text in _read_texts(directory) for token in text]
    if tokens and not 0 <= min(tokens) <= max(tokens) < target.vocab_size:
        raise ValueError(f"{STORE} of draft {directory.name} holds tokens outside of 0 to {target.vocab_size - 1}")


def _read_texts(directory: Path) -> list[list[int]]:
    if not (directory / STORE).is_file():
        raise ValueError(f"draft {directory.name}: {STORE} is missing")
    tensors = read_tensors(directory)
    if tensors.keys() != TENSORS or any(one.dtype != torch.int32 or one.ndim != 1 for one in tensors.values()):
        raise ValueError(
            f"{STORE} of draft {directory.name} must hold token_ids and lengths, both of one axis of int32"
        )
    tokens, lengths = tensors["token_ids"], tensors["lengths"].tolist()
    if sum(lengths) != len(tokens) or min(lengths, default=1) < 1:
        raise ValueError(f"{STORE} of draft {directory.name} has {len(tokens)} tokens for texts of {sum(lengths)}")
    return [part.tolist() for part in tokens.split(lengths)] if lengths else []
