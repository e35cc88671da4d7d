"""Token recycling: what the target thought likely after a token the last time, it may say after it now.

A matrix holds for each token the k likeliest next ones of the last pass that read it, whether or not it was accepted
then. A draft fills a tree of fixed shape from it, level by level: the child of rank r of a token is the r-th of its
row. Rows start empty and are learnt while requests run, so nothing is stored with a draft; they take 4·k bytes a token
of the vocabulary, 1.5 MiB for 49,152 tokens and k = 8.
"""

from typing import Annotated, Literal

import numpy as np
import torch
from pydantic import Field, field_validator
from torch import Tensor

from models import catalog
from models.core.drafting.proposal import Proposal
from models.core.drafting.weightless import Format, TargetDraft
from models.drafts import Draw, GoOn
from models.params import BaseParams
from models.trees import Shape, sequoia

PAPER = "arXiv:2408.08696"
ARCHITECTURES = ("TokenRecyclingDraft",)
SERVED = False
UNKNOWN = -1


class Params(BaseParams):
    """What is recycled."""

    name: Literal["token_recycling"] = "token_recycling"
    num_candidates: int = Field(8, ge=1, description="k, next tokens that are kept of each token.")
    tree: Annotated[BaseParams, catalog.Method("trees")] = Field(
        sequoia.Params(), description="the shape of what is drafted, a tree that is the same in each step."
    )

    @field_validator("tree")
    @classmethod
    def _is_fixed(cls, tree: BaseParams) -> BaseParams:
        if not hasattr(catalog.load("trees", tree.name), "shape"):
            raise ValueError(f"tree {tree.name} follows a draft's probabilities, which there are none of")
        return tree


class TokenRecycling(TargetDraft):
    """The matrix [V, k] int32, which all requests share: likeliest first, −1 where a token was not read yet."""

    asks = False
    branches = True
    params: Params

    def __init__(self, params: Params, config: dict[str, object]) -> None:
        super().__init__(params, config)
        self.candidates = np.full((self.config["vocab_size"], params.num_candidates), UNKNOWN, np.int32)

    def drafter(self, max_len: int) -> "_Drafter":
        return _Drafter(self)


class _Drafter:
    def __init__(self, draft: TokenRecycling) -> None:
        self.draft = draft
        self._last, self._device = UNKNOWN, torch.device("cpu")

    def observe(self, token_ids: Tensor, logits: Tensor) -> None:
        """See `models.core.drafting.drafters.Observer`; of a token that stands in several rows the last one counts."""
        candidates = self.draft.candidates
        likeliest = logits.topk(min(candidates.shape[1], logits.shape[1])).indices.cpu().numpy()
        candidates[token_ids.cpu().numpy(), : likeliest.shape[1]] = likeliest

    def extend(self, token_ids: Tensor, hidden: Tensor) -> None:
        self._last, self._device = int(token_ids[-1]), token_ids.device

    def propose(self, num_tokens: int, draw: Draw, go_on: GoOn | None = None) -> Proposal:
        tree = self.draft.params.tree
        tokens, parents = recycle(
            self.draft.candidates, self._last, catalog.load("trees", tree.name).shape(num_tokens, tree)
        )
        return Proposal(torch.tensor([tokens], dtype=torch.int64, device=self._device), parents)


def recycle(candidates: np.ndarray, last: int, shape: Shape) -> tuple[list[int], tuple[int, ...]]:
    """Fill a shape from candidates [V, k], likeliest first, −1 where unknown; ranks from k on are left out. Returns
    tokens and parents of the nodes whose token is known, behind the token `last`."""
    tokens: list[int] = []
    parents: list[int] = []
    numbers = {-1: -1}  # nodes of the shape that are filled
    for node, (parent, rank) in enumerate(zip(shape.parents, shape.ranks, strict=True)):
        if parent not in numbers or rank >= candidates.shape[1]:
            continue
        above = numbers[parent]
        token = int(candidates[tokens[above] if above >= 0 else last, rank])
        if token != UNKNOWN:
            numbers[node] = len(tokens)
            tokens.append(token)
            parents.append(above)
    return tokens, tuple(parents)


_format = Format("token_recycling", ARCHITECTURES, Params, TokenRecycling)
create, renew, save, load, check = _format.create, _format.renew, _format.save, _format.load, _format.check
vllm_config, vllm_weights = _format.vllm_config, _format.vllm_weights
