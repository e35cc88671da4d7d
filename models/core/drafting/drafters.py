"""How drafts draft token by token and are unrolled, and what a drafter may be able to do besides.

The reference engine asks which of these it is. Letters: as in `models.drafts`, n tokens or nodes.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from models.core.drafting.proposal import Proposal
from models.core.layers.decoder import Begun, Cache, Decoder
from models.drafts import Draft, Draw, GoOn, KeepRows, Unrolled, confidence


@runtime_checkable
class Observer(Protocol):
    """A drafter that learns from all that the target says, also after tokens that it rejected."""

    def observe(self, token_ids: Tensor, logits: Tensor) -> None:
        """Take in a pass of the target; `extend` follows with what came of it.

        `token_ids` [n] int64 are the last certain token and those that were proposed, of a prompt its last token
        alone, and `logits` [n, V] of what follows each.
        """


@runtime_checkable
class Remembering(Protocol):
    """A drafter from whose request later ones may draft."""

    def end(self) -> None:
        """Take in that the request has ended; called once."""


@runtime_checkable
class Expander(Protocol):
    """A drafter that can go on from any node of a tree; see `models.trees.Expand`."""

    def expand(self, token_ids: Sequence[int], parents: Sequence[int], nodes: Sequence[int]) -> Tensor:
        """Return [n, V] log-probabilities of what follows some nodes of a tree after the last certain token.

        `token_ids` and `parents` are of the tree so far; node −1 is the last certain token. What can't be drafted
        has −∞.
        """


@runtime_checkable
class SelfDrafter(Protocol):
    """A drafter that runs layers of the target itself; see `models.core.drafting.self_draft`."""

    def share(self, target: Decoder, cache: Cache) -> None:
        """Draft with an engine's own target, whose weights no swap changes.

        Where it is asked to propose, the sequence's `cache` holds all certain tokens but the last; what is written
        behind them is lost, `length` is as before afterwards.
        """

    def begun(self) -> Begun | None:
        """Return how far the last certain token and the first drafted ones are on their way through the target.

        None if they have not begun, or something was extended since they were proposed.
        """


@runtime_checkable
class Nested(Protocol):
    """A drafter of a draft in which others are nested; see `models.drafts.Draft.nested`."""

    def take_from(self, sure: float) -> None:
        """Let the smallest draft say each token, and larger ones go on from it as long as one is not sure enough.

        A draft's word is taken from `models.drafts.confidence` `sure` on, 0 to 1; the whole draft's always.
        """


class Beside(NamedTuple):
    """What the target reads in a pass beside the tokens."""

    vectors: Tensor  # [m, H] in place of embeddings
    parents: tuple[int, ...]  # of each, the row that it follows; rows count on behind the last token's


@runtime_checkable
class QueryingDrafter(Protocol):
    """A drafter that has vectors of its own read in the passes that verify what it drafted."""

    def ask(self, proposal: Proposal) -> Beside:
        """Say what is to be read beside what it has just proposed; what comes of it is handed to `hear`."""

    def hear(self, states: Tensor, row: int) -> None:
        """Take in [m, H] last states, normed, that the target made of that; `extend` was called before.

        `row` is that of the last token that was accepted, 0 of the last certain one.
        """


def step_by_step(
    running: Tensor, num_steps: int, keep: KeepRows | None, say: Callable[[int, Tensor], tuple[Tensor | None, Tensor]]
) -> list[Unrolled]:
    """Unroll rows whose steps need nothing of each other, [n] row numbers at first; see `Draft.unroll`. `say` makes of
    a step and the rows that run in it what the output matrix multiplies, if there is one, and logits."""
    drafted = []
    for step in range(num_steps):
        hidden, logits = say(step, running)
        drafted.append(Unrolled(running, logits, hidden))
        if keep is not None and step + 1 < num_steps:
            running = running[keep(step, running, logits)]
    return drafted


def require_width(draft: Draft, hidden: Tensor, width: int) -> None:
    """Raise ValueError unless tapped states [..., A·H] are as wide as what a draft reads."""
    if hidden.shape[-1] != width:
        raise ValueError(
            f"{type(draft).__name__} reads the target's states after layers {draft.taps}, {width} wide; got states of "
            f"width {hidden.shape[-1]}"
        )


def draft_chain(
    after: Callable[[list[int]], Tensor], num_tokens: int, draw: Draw, go_on: GoOn | None, device: torch.device | str
) -> Proposal:
    """Draft one token after the other, by the logits [D] `after` those drafted already; see `Drafter.propose`."""
    proposed: list[int] = []
    drawn_from: list[Tensor | None] = []
    while True:
        logits = after(proposed)
        token, q = draw(logits)
        proposed.append(token)
        drawn_from.append(q)
        if len(proposed) == num_tokens or (go_on is not None and not go_on(confidence(logits))):
            return Proposal.chain(proposed, drawn_from, device)
