"""Drafters of models that read text into a cache of their own: a small language model, or the target on less text.

Drafted tokens that were right are still in the cache and not read again.

Where drafts are nested in a language model, each token is said by the smallest that is sure of it. A nested draft is
the first layers of the whole one, so a larger one goes on from what a smaller one made and reads nothing twice. Rows
whose token a small draft said wait before the layers that they have not gone through. The first token that needs these
takes all that wait along, in one pass that reads the weights once. So a token is said as if every layer had seen all
tokens before it.

S2D has a threshold for each draft and chooses anew for each token too. Which draft said a token follows from the tokens
before it, so q is that draft's distribution and verification is as lossless as ever.
"""

import os
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from models.core.drafting.drafters import draft_chain
from models.core.drafting.proposal import Proposal
from models.core.layers.decoder import Cache, Decoder
from models.drafts import Draw, GoOn, confidence
from models.trees import lay_out

PAPER = "arXiv:2407.01955"


class Reader:
    """See `models.drafts.Drafter` and `models.core.drafting.drafters.Expander`.

    Attributes:
        known: the certain tokens that the model reads, at least one where it drafts.
        max_len: tokens that its cache is made for when it first drafts.
    """

    draft: Any

    def __init__(self, draft: Any, max_len: int) -> None:
        self.draft, self.max_len = draft, max_len
        self.known: list[int] = []
        self._held: list[int] = []  # the cache's tokens
        self._cache: Cache | None = None

    def decoder(self) -> Decoder:
        """Return what reads; the draft's own in most families."""
        decoder: Decoder = self.draft.decoder()
        return decoder

    def extend(self, token_ids: Tensor, hidden: Tensor) -> None:
        self.known += token_ids.tolist()[1 if self.known else 0 :]

    def expand(self, token_ids: Sequence[int], parents: Sequence[int], nodes: Sequence[int]) -> Tensor:
        """See `models.core.drafting.drafters.Expander`; reads the nodes' paths anew."""
        decoder, cache = self.decoder(), self._cut_back()
        tokens, above, rows = lay_out(self.known[cache.length :], token_ids, parents, nodes)
        states, _ = decoder.forward(torch.tensor(tokens, device=decoder.device), cache, parents=above)
        self._held = self.known[:-1]  # which the cache begins with; the rest is read again
        return decoder.logits(states[rows]).log_softmax(-1)

    def propose(self, num_tokens: int, draw: Draw, go_on: GoOn | None = None) -> Proposal:
        decoder, cache = self.decoder(), self._cut_back()

        def after(proposed: list[int]) -> Tensor:
            unread = proposed[-1:] or self.known[cache.length :]
            return self._read(torch.tensor(unread, device=decoder.device), cache)

        proposal = draft_chain(after, num_tokens, draw, go_on, decoder.device)
        self._held = self.known + proposal.token_ids[0, :-1].tolist()
        return proposal

    def _read(self, token_ids: Tensor, cache: Cache) -> Tensor:
        """Take [n] tokens into the cache, and return the logits [V] of what follows the last."""
        decoder = self.decoder()
        return decoder.logits(decoder.forward(token_ids, cache)[0][-1:])[0]

    def _cut_back(self) -> Cache:
        """Return the cache with what it holds of the certain tokens but the last."""
        if self._cache is None:
            self._cache = Cache(self.decoder(), self.max_len)
        self._cache.length = len(os.path.commonprefix([self._held, self.known[:-1]]))
        return self._cache


class NestedReader(Reader):
    """See `models.core.drafting.drafters.Nested`; until it is told from when on a draft is sure enough, the whole draft
    drafts.

    Attributes:
        sure: that confidence, None for never.
    """

    def __init__(self, draft: Any, max_len: int) -> None:
        super().__init__(draft, max_len)
        self._ends = (*draft.nested, draft.decoder().num_layers)
        self._waiting: list[Tensor] = []  # of each part but the first, [n, H] of the rows that have yet to go through
        self.sure: float | None = None

    def take_from(self, sure: float) -> None:
        self.sure = sure

    def decoder(self) -> Decoder:
        return cast("Decoder", self.draft.decoder())

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
            if end == self._ends[-1] or self.sure is not None:
                logits = decoder.said(state[-1:])[0]
                if self.sure is not None and confidence(logits) >= self.sure:
                    break
        if end < self._ends[-1]:
            self._waiting[number] = torch.cat([self._waiting[number], state])
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
