"""Drafting with the drafts that are nested in a language model: each token is said by the smallest that is sure of it.

A nested draft is the first layers of the whole one, so a larger one goes on from what a smaller one made and reads
nothing twice. Rows whose token a small draft said wait before the layers that they have not gone through. The first
token that needs these takes all that wait along, in one pass that reads the weights once. So a token is said as if
every layer had seen all tokens before it.

S2D has a threshold for each draft and chooses anew for each token too. Which draft said a token follows from the tokens
before it, so q is that draft's distribution and verification is as lossless as ever.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from models.core.drafting.reading import Reader
from models.core.layers.decoder import Cache
from models.drafts import confidence

PAPER = "arXiv:2407.01955"


class NestedReader(Reader):
    """See `models.core.drafting.drafters.Nested`; until it is told from when on a draft is sure enough, the whole draft
    drafts.

    Attributes:
        sure: that confidence, None for never.
        said_by: layers to how many tokens the draft of so many has said.
    """

    def __init__(self, draft: Any, max_len: int) -> None:
        super().__init__(draft, max_len)
        self._ends = (*draft.nested, draft.decoder().num_layers)
        self._waiting: list[Tensor] = []  # of each part but the first, [n, H] of the rows that have yet to go through
        self.sure: float | None = None
        self.said_by = dict.fromkeys(self._ends, 0)

    def take_from(self, sure: float) -> None:
        self.sure = sure

    def expand(self, token_ids: Sequence[int], parents: Sequence[int], nodes: Sequence[int]) -> Tensor:
        """See the base; the whole draft says what follows."""
        cache = self._cut_back()
        state = self._waiting[0][:0]
        for number in range(1, len(self._ends)):
            state = self._go_on(number, state, cache)
        return super().expand(token_ids, parents, nodes)

    def _read(self, token_ids: Tensor, cache: Cache) -> Tensor:
        decoder, state = self.decoder(), self.decoder().embed(token_ids)
        cache.length += len(token_ids)
        for number, end in enumerate(self._ends):
            state = self._go_on(number, state, cache)
            if end < self._ends[-1] and self.sure is None:
                continue
            logits = decoder.said(state[-1:])[0]
            if end == self._ends[-1] or confidence(logits) >= (self.sure or 0.0):
                break
        if end < self._ends[-1]:
            self._waiting[number] = torch.cat([self._waiting[number], state])
        self.said_by[end] += 1
        return logits

    def _go_on(self, number: int, state: Tensor, cache: Cache) -> Tensor:
        """Run rows [n, H], the last ones, through a part of the layers, and those that wait before it with them."""
        if number:
            state = torch.cat([self._waiting[number - 1], state])
            self._waiting[number - 1] = state[:0]
        if not len(state):
            return state
        layers = range(self._ends[number - 1] if number else 0, self._ends[number])
        return self.decoder().run(layers, state, cache, cache.length - len(state))

    def _cut_back(self) -> Cache:
        """See the base; rows that wait are the last ones, those before an earlier part behind the others."""
        length = 0 if self._cache is None else self._cache.length
        cache = super()._cut_back()
        if not self._waiting:
            nothing = self.decoder().embed(torch.zeros(0, dtype=torch.int64, device=self.decoder().device))
            self._waiting = [nothing] * (len(self._ends) - 1)
        forgotten = length - cache.length
        for number, rows in enumerate(self._waiting):
            kept = max(len(rows) - forgotten, 0)
            forgotten -= len(rows) - kept
            self._waiting[number] = rows[:kept]
        return cache
