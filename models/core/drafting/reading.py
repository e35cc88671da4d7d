"""Drafters of models that read text into a cache of their own: a small language model, or the target on less text.

Drafted tokens that were right are still in the cache and not read again.
"""

import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from models.core.drafting.proposal import Proposal
from models.core.layers.decoder import Cache, Decoder
from models.drafts import Draw, GoOn, draft_chain
from models.trees import lay_out


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
        states, _ = decoder.forward(token_ids, cache)
        return decoder.logits(states[-1:])[0]

    def _cut_back(self) -> Cache:
        """Return the cache with what it holds of the certain tokens but the last."""
        if self._cache is None:
            self._cache = Cache(self.decoder(), self.max_len)
        self._cache.length = len(os.path.commonprefix([self._held, self.known[:-1]]))
        return self._cache
