"""How feature drafts draft: one node after another, each run once after the tokens on its path."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from models.drafting.proposal import Proposal
from models.drafts import Draw, GoOn, confidence
from models.trees import path_to

if TYPE_CHECKING:
    from models.drafting.features import FeatureDraft, LayeredDraft


class _Node(NamedTuple):
    """What the draft came to after some tokens.

    Attributes:
        state: [H] the layer's output.
        own: keys and values [kv heads, width] of each token but the first.
        logits: [D] of what follows.
    """

    state: Tensor
    own: list[tuple[Tensor, Tensor]]
    logits: Tensor


class PathDrafter(ABC):
    """See `models.drafts.Drafter`. What follows a node hangs on the tokens on its path, on its depth at least."""

    draft: "LayeredDraft"

    @abstractmethod
    def _after(self, paths: Sequence[tuple[int, ...]]) -> Tensor:
        """Return the logits [n, D] after some tokens, which follow the last certain one."""

    def propose(self, num_tokens: int, draw: Draw, go_on: GoOn | None = None) -> Proposal:
        """See the base."""
        path: tuple[int, ...] = ()
        drawn_from = []
        num_tokens = min(num_tokens, self.draft.max_depth or num_tokens)
        while True:
            logits = self._after([path])[0]
            token, q = draw(logits)
            path = (*path, token)
            drawn_from.append(q)
            if len(path) == num_tokens or (go_on is not None and not go_on(confidence(logits))):
                break
        return Proposal.chain(path, drawn_from, self.draft.embedding.device)

    def expand(self, token_ids: Sequence[int], parents: Sequence[int], nodes: Sequence[int]) -> Tensor:
        """See `models.drafting.drafters.Expander`; nothing follows a node that is as deep as the draft can go."""
        paths = [path_to(node, token_ids, parents) for node in nodes]
        deepest = self.draft.max_depth
        rows = [row for row, path in enumerate(paths) if deepest is None or len(path) < deepest]
        found = self.draft.embedding.new_full((len(nodes), len(self.draft.embedding)), float("-inf"))
        if rows:
            log_probs = self._after([paths[row] for row in rows]).log_softmax(-1)
            found[torch.tensor(rows, device=found.device)[:, None], self.draft.vocabulary] = log_probs
        return found


class FeatureDrafter(PathDrafter):
    """See the base; a node is run once. Only the first unroll's keys and values outlive a step."""

    draft: "FeatureDraft"

    def __init__(self, draft: "FeatureDraft", max_len: int) -> None:
        self.draft = draft
        shape = (1, max_len, draft.num_kv_heads, draft.head_dim)
        self._keys, self._values = (torch.empty(shape, device=draft.embedding.device) for _ in range(2))
        self._length = 0
        self._state = self._last = torch.empty(0)
        self._nodes: dict[tuple[int, ...], _Node] = {}  # by the tokens after the last certain one
        self._run_by = draft

    def extend(self, token_ids: Tensor, hidden: Tensor) -> None:
        """See the base."""
        start, stop = self._length, self._length + len(hidden)
        combined, keys, values = self.draft.context(hidden[None].float(), token_ids[None, 1:], start)
        self._keys[:, start:stop], self._values[:, start:stop] = keys, values
        self._state, self._last, self._length = combined[0, -1:], token_ids[-1:], stop
        self._nodes = {}

    def _after(self, paths: Sequence[tuple[int, ...]]) -> Tensor:
        """Return the logits [n, D] after some tokens, of which those that were not yet there are run level by level."""
        if self._run_by is not self.draft:
            self._nodes, self._run_by = {}, self.draft
        beginnings = {path[:size] for path in paths for size in range(len(path) + 1)}
        for depth, level in groupby(sorted(beginnings - self._nodes.keys(), key=len), key=len):
            self._run(depth, list(level))
        return torch.stack([self._nodes[path].logits for path in paths])

    def _run(self, depth: int, level: Sequence[tuple[int, ...]]) -> None:
        """Run nodes of one depth, whose parents have been."""
        state, last, own = self._state, self._last, []
        if depth:
            above = [self._nodes[path[:-1]] for path in level]
            state = torch.stack([node.state for node in above])
            last = torch.tensor([path[-1] for path in level], device=state.device)
            own = [_stacked(pairs) for pairs in zip(*(node.own for node in above), strict=True)]
        index = torch.full_like(last, self._length - 1)
        keys, values = self._keys[:, : self._length], self._values[:, : self._length]
        state = self.draft.advance(depth, state, last, torch.zeros_like(last), index, keys, values, own)
        logits = self.draft.say(state, depth)[1]
        for row, path in enumerate(level):
            self._nodes[path] = _Node(state[row], [(k[row], v[row]) for k, v in own], logits[row])


def _stacked(pairs: Iterable[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    keys, values = zip(*pairs, strict=True)
    return torch.stack(keys), torch.stack(values)
