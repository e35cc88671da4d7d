"""Speculative Jacobi decoding: the target guesses its own next tokens, all places at once, until a guess stands.

A pass over the last certain token and N guesses tells for each of them what follows. The guesses that hold are
accepted; behind the first that doesn't, what the target said, given guesses that were wrong, is the next guess. At
temperature 0 that is a fixed-point iteration of x ← argmax p(· | x). Above it each guess is drawn anew from the
distribution of its place, q, and the next pass keeps it with probability min(1, p / q): the paper's convergence
criterion, which is the rule of speculative sampling, and as lossless. Places that no pass has reached yet are drawn
from the last distribution that there is.
"""

from typing import Literal

from torch import Tensor

from models.core.drafting.drafters import draft_chain
from models.core.drafting.proposal import Proposal
from models.core.drafting.weightless import Format, TargetDraft
from models.drafts import Draw, GoOn
from models.params import BaseParams

PAPER = "arXiv:2410.01699, algorithm 1; greedy: arXiv:2305.10427"
ARCHITECTURES = ("JacobiDraft",)
SERVED = False


class Params(BaseParams):
    """Nothing to set; how many places are guessed is the engine's K."""

    name: Literal["jacobi"] = "jacobi"


class Jacobi(TargetDraft):
    def drafter(self, max_len: int) -> "_Drafter":
        return _Drafter(self)


class _Drafter:
    def __init__(self, draft: Jacobi) -> None:
        self.draft = draft
        self._said: Tensor | None = None  # [n, V] of the last pass
        self._num_certain = 0  # of its rows

    def observe(self, token_ids: Tensor, logits: Tensor) -> None:
        self._said = logits

    def extend(self, token_ids: Tensor, hidden: Tensor) -> None:
        self._num_certain = len(token_ids) - 1

    def propose(self, num_tokens: int, draw: Draw, go_on: GoOn | None = None) -> Proposal:
        if self._said is None:
            return Proposal.chain([])
        said, first, last = self._said, self._num_certain, len(self._said) - 1
        return draft_chain(lambda made: said[min(first + len(made), last)], num_tokens, draw, go_on, said.device)


_format = Format("jacobi", ARCHITECTURES, Params, Jacobi)
create, renew, save, load, check = _format.create, _format.renew, _format.save, _format.load, _format.check
vllm_config, vllm_weights = _format.vllm_config, _format.vllm_weights
