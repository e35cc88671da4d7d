"""SWIFT: try a set of sublayers beside each step, on what the target has said, and keep it if it would say more of it.

A trial is one pass of the part over the first tokens of the request's answer, told all that came before; the score is
the share of them that it finds likeliest. Sets all skip equally many sublayers. Most are random; now and then one is
what a search over all that was tried, by any request, suggests. The paper's code holds a set to the best score of any
earlier request; here the set in use is scored on each request's own tokens first.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from models.core.drafting.proposal import Proposal
from models.core.drafting.self_draft import TreeDrafter, read_aside
from models.core.drafting.subset_search import Subset, SubsetSearch
from models.core.layers.decoder import Sublayers
from models.drafts import Draw, GoOn

if TYPE_CHECKING:
    from models.drafts.self_skip import Params, SelfSkip


class Tuning:
    """What all requests of a draft have tried."""

    def __init__(self, num_items: int, size: int, params: "Params") -> None:
        self._search = SubsetSearch(num_items, torch.Generator().manual_seed(0), size)
        self._every, self._patience = params.bayes_every, params.patience
        self._in_vain = 0

    @property
    def over(self) -> bool:
        """Whether nothing is tried any more."""
        return self._in_vain >= self._patience

    def next(self) -> Subset:
        """Return what to try."""
        guessed = (len(self._search.tried) + 1) % self._every == 0
        return self._search.promising() if guessed else self._search.random()

    def note(self, subset: Subset, score: float, better: bool) -> None:
        """Take in how a set did, and whether it is in use from now on."""
        self._search.note(subset, score)
        self._in_vain = 0 if better else self._in_vain + 1


class TuningDrafter(TreeDrafter):
    """A drafter that tries a set before it proposes."""

    draft: "SelfSkip"

    def __init__(self, draft: "SelfSkip", max_len: int) -> None:
        super().__init__(draft, max_len)
        self._scored: tuple[Sublayers, float] | None = None  # the set in use, on this request
        self._tried = False  # in this step

    def extend(self, token_ids: Tensor, hidden: Tensor) -> None:
        super().extend(token_ids, hidden)
        self._tried = False

    def propose(self, num_tokens: int, draw: Draw, go_on: GoOn | None = None) -> Proposal:
        self._try()
        return super().propose(num_tokens, draw, go_on)

    def expand(self, token_ids: Sequence[int], parents: Sequence[int], nodes: Sequence[int]) -> Tensor:
        self._try()
        return super().expand(token_ids, parents, nodes)

    def _try(self) -> None:
        draft, params = self.draft, self.draft.params
        enough_said = len(self.known) - self.num_asked > params.window
        if self._tried or draft.tuning.over or not enough_said:
            return
        self._tried = True
        if self._scored is None or self._scored[0] != draft.skipped:
            self._scored = draft.skipped, self._score(draft.skipped)
        if self._scored[1] >= params.enough:
            return
        subset = draft.tuning.next()
        skipped = draft.as_sublayers(subset)
        score = self._score(skipped)
        better = score > self._scored[1]
        draft.tuning.note(subset, score, better)
        if better:
            draft.skip(skipped)
            self._scored = skipped, score

    def _score(self, skipped: Sublayers) -> float:
        """Return the share of the window's tokens that a part finds likeliest."""
        target, cache = self.target_and_cache()
        start, window = self.num_asked, self.draft.params.window
        said = torch.tensor(self.known[start : start + window + 1], device=target.device)
        states = read_aside(target, said[:-1], cache, start, skipped)
        return float((target.logits(states).argmax(-1) == said[1:]).float().mean())
