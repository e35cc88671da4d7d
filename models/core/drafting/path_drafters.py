"""How feature drafts draft: one node after another, each run once after the tokens on its path."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from models.core.drafting.proposal import Proposal
from models.drafts import Draw, GoOn, draft_chain
from models.trees import path_to

if TYPE_CHECKING:
    from models.core.drafting.features import FeatureDraft, LayeredDraft


class Node(NamedTuple):
    """What a draft came to after some tokens.

    Attributes:
        state: what the next pass reads, [H] or [S, H].
        logits: [S, D] of what follows, S levels of nodes, one in most families.
        own: keys and values of the tokens but the certain ones, as the family keeps them.
        memory: what else goes from pass to pass.
    """

    state: Tensor
    logits: Tensor
    own: Any
    memory: Any = None


class PathDrafter(ABC):
    """See `models.drafts.Drafter`. What follows a node hangs on the tokens on its path, on its depth at least."""

    draft: "LayeredDraft"

    @abstractmethod
    def _after(self, paths: Sequence[tuple[int, ...]]) -> Tensor:
        """Return the logits [n, D] after some tokens, which follow the last certain one."""

    def propose(self, num_tokens: int, draw: Draw, go_on: GoOn | None = None) -> Proposal:
        num_tokens = min(num_tokens, self.draft.max_depth or num_tokens)
        device = self.draft.embedding.device
        return draft_chain(lambda path: self._after([tuple(path)])[0], num_tokens, draw, go_on, device)

    def expand(self, token_ids: Sequence[int], parents: Sequence[int], nodes: Sequence[int]) -> Tensor:
        """See `models.core.drafting.drafters.Expander`; nothing follows a node that is as deep as the draft can go."""
        paths = [path_to(node, token_ids, parents) for node in nodes]
        deepest = self.draft.max_depth
        rows = [row for row, path in enumerate(paths) if deepest is None or len(path) < deepest]
        found = self.draft.embedding.new_full((len(nodes), len(self.draft.embedding)), float("-inf"))
        if rows:
            log_probs = self._after([paths[row] for row in rows]).log_softmax(-1)
            found[torch.tensor(rows, device=found.device)[:, None], self.draft.vocabulary] = log_probs
        return found


class NodeDrafter(PathDrafter):
    """See the base; a pass is made once for all that goes on from the same tokens.

    Attributes:
        per_pass: S, levels of nodes that a pass makes.
    """

    per_pass = 1

    def __init__(self, draft: "LayeredDraft") -> None:
        self.draft = self._run_by = draft
        self._nodes: dict[tuple[int, ...], Node] = {}  # by the tokens after the last certain one

    def _after(self, paths: Sequence[tuple[int, ...]]) -> Tensor:
        """See the base; passes that were not yet made are, level by level."""
        if self._run_by is not self.draft:
            self._nodes, self._run_by = {}, self.draft
        size = self.per_pass
        beginnings = {path[:length] for path in paths for length in range(0, len(path) + 1, size)}
        for _, level in groupby(sorted(beginnings - self._nodes.keys(), key=len), key=len):
            self._run(list(level))
        return torch.stack([self._nodes[path[: len(path) // size * size]].logits[len(path) % size] for path in paths])

    @abstractmethod
    def _run(self, level: Sequence[tuple[int, ...]]) -> None:
        """Make the passes after beginnings of one length, whose own beginnings have been."""


class FeatureDrafter(NodeDrafter):
    """See the base; only the first unroll's keys and values outlive a step."""

    draft: "FeatureDraft"

    def __init__(self, draft: "FeatureDraft", max_len: int) -> None:
        super().__init__(draft)
        shape = (1, max_len, draft.num_kv_heads, draft.head_dim)
        self._keys, self._values = (torch.empty(shape, device=draft.embedding.device) for _ in range(2))
        self._length = 0
        self._state = self._last = torch.empty(0)

    def extend(self, token_ids: Tensor, hidden: Tensor) -> None:
        start, stop = self._length, self._length + len(hidden)
        combined, keys, values = self.draft.context(hidden[None].float(), token_ids[None, 1:], start)
        self._keys[:, start:stop], self._values[:, start:stop] = keys, values
        self._state, self._last, self._length = combined[0, -1:], token_ids[-1:], stop
        self._nodes = {}

    def _run(self, level: Sequence[tuple[int, ...]]) -> None:
        state, last, own, depth = self._state, self._last, [], len(level[0])
        if depth:
            above = [self._nodes[path[:-1]] for path in level]
            state = torch.stack([node.state for node in above])
            last = torch.tensor([path[-1] for path in level], device=state.device)
            own = [stacked(pairs) for pairs in zip(*(node.own for node in above), strict=True)]
        index = torch.full_like(last, self._length - 1)
        keys, values = self._keys[:, : self._length], self._values[:, : self._length]
        state = self.draft.advance(depth, state, last, torch.zeros_like(last), index, keys, values, own)
        logits = self.draft.say(state, depth)[1]
        for row, path in enumerate(level):
            self._nodes[path] = Node(state[row], logits[row, None], [(k[row], v[row]) for k, v in own])


def stacked(pairs: Iterable[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Put keys and values of several rows above each other, along a new axis 0."""
    keys, values = zip(*pairs, strict=True)
    return torch.stack(keys), torch.stack(values)
