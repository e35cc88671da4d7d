"""Draft families that are the target itself, without some of its sublayers: a draft is a config.json.

Tokens that are certain are read from the target's own keys and values, as in Draft & Verify and SWIFT: nothing of a
prompt or of an accepted token is computed for the draft, and what a drafted token sees of them is better than what the
part would have made. Keys and values of drafted tokens stand behind them in the same cache until the target's pass
writes its own in their place. Layers before the first that lacks a sublayer read what the target reads, so their
states are handed on to the target's pass, which need not go through them again (`models.layers.decoder.Begun`).
"""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig

from models.drafting.proposal import Proposal
from models.drafting.weightless import Format, Weightless
from models.drafts import Draft, Draw, GoOn, KeepRows, Rows, Unrolled, confidence, step_by_step
from models.layers.decoder import Begun, Cache, Decoder, Sublayers
from models.params import BaseParams
from models.targets import MODEL_TYPES, TargetCard
from models.trees import lay_out


class TargetRunner(Draft):
    """A draft that runs layers of the target.

    Attributes:
        target_dir: of the target.
    """

    target_dir: Path
    _decoder: Decoder | None = None

    def decoder(self) -> Decoder:
        """Return a copy of the target in float32, for whoever asks outside of an engine."""
        device = str(self.vocabulary.device)
        if self._decoder is None or self._decoder.device != device:
            self._decoder = Decoder.load(self.target_dir, torch.float32, device)
        return self._decoder


class TargetPart(TargetRunner):
    """A draft that runs a part of the target."""

    @property
    @abstractmethod
    def skipped(self) -> Sublayers:
        """What it leaves out of the target; neither nothing nor everything."""


class SelfDraft(TargetPart, Weightless):
    """A part of the target, and nothing else."""

    expands = True

    def unroll(self, rows: Rows, num_steps: int, keep: KeepRows | None = None) -> list[Unrolled]:
        """See `models.drafts.Draft`; the states are those of a copy of the target, and `rows.hidden` is not read."""
        target, starts = self.decoder(), rows.index + 1
        states: dict[int, Tensor] = {}
        for sequence in rows.sequence.unique().tolist():
            here = (rows.sequence == sequence).nonzero()[:, 0]
            drafted_from = starts[here].tolist()
            token_ids = rows.token_ids[sequence, : max(drafted_from) + num_steps]
            states |= zip(here.tolist(), self.states(target, token_ids, drafted_from, num_steps), strict=True)

        def say(step: int, running: Tensor) -> tuple[None, Tensor]:
            hidden = torch.stack([states[row][step] for row in running.tolist()]) if len(running) else None
            return None, starts.new_zeros(0, target.vocab_size).float() if hidden is None else target.logits(hidden)

        return step_by_step(torch.arange(len(starts), device=starts.device), num_steps, keep, say)

    def states(self, target: Decoder, token_ids: Tensor, starts: Sequence[int], num_tokens: int) -> Iterator[Tensor]:
        """Yield what it makes of some tokens from each start on, [num_tokens, H], after the target's keys before it.

        Args:
            target: the target.
            token_ids: [T] of a text that ends with the last such token.
            starts: places in it.
            num_tokens: of each.
        """
        cache = Cache(target, max(starts) + len(starts) * num_tokens)
        target.forward(token_ids[: max(starts)], cache)
        yield from read_ahead(target, token_ids, cache, starts, num_tokens, self.skipped)

    def drafter(self, max_len: int) -> "TreeDrafter":
        """See `models.drafts.Draft`."""
        return TreeDrafter(self, max_len)


class SharedTarget:
    """What drafters that run the target have in common; each has a target of its own until one is shared.

    Attributes:
        known: tokens that are certain.
        num_asked: of these, how many are the prompt's; the rest the target has said.
    """

    draft: TargetRunner

    def __init__(self, draft: TargetRunner, max_len: int) -> None:
        self.draft = draft
        self.known: list[int] = []
        self.num_asked = 0
        self._max_len = max_len
        self._shared: tuple[Decoder, Cache] | None = None

    def share(self, target: Decoder, cache: Cache) -> None:
        """See `models.drafting.drafters.SelfDrafter`."""
        self._shared = target, cache

    def begun(self) -> Begun | None:
        """See `models.drafting.drafters.SelfDrafter`; nothing has."""
        return None

    def extend(self, token_ids: Tensor, hidden: Tensor) -> None:
        """See the base."""
        if not self.known:
            self.num_asked = len(token_ids) - 1
        self.known += token_ids.tolist()[1 if self.known else 0 :]

    def target_and_cache(self) -> tuple[Decoder, Cache]:
        """Return what it drafts with; the cache holds all that is certain but the last token."""
        if self._shared is None:
            target = self.draft.decoder()
            self._shared = target, Cache(target, self._max_len)
        target, cache = self._shared
        if unread := self.known[cache.length : -1]:
            target.forward(torch.tensor(unread, device=target.device), cache)
        return target, cache


class Drafter(SharedTarget):
    """See `models.drafts.Drafter` and `SelfDrafter`."""

    draft: TargetPart

    def __init__(self, draft: TargetPart, max_len: int) -> None:
        super().__init__(draft, max_len)
        self._begun: list[Begun] = []

    def begun(self) -> Begun | None:
        """See `models.drafting.drafters.SelfDrafter`."""
        whole = {begun.num_layers for begun in self._begun}
        return Begun(whole.pop(), torch.cat([one.states for one in self._begun])) if whole - {0} else None

    def extend(self, token_ids: Tensor, hidden: Tensor) -> None:
        """See the base."""
        super().extend(token_ids, hidden)
        self._begun = []

    def propose(self, num_tokens: int, draw: Draw, go_on: GoOn | None = None) -> Proposal:
        """See the base."""
        target, cache = self.target_and_cache()
        start, last, skipped = cache.length, self.known[-1], self.draft.skipped
        proposed: list[int] = []
        drawn_from: list[Tensor | None] = []
        self._begun = []
        while True:
            states, begun = target.partial(torch.tensor([last], device=target.device), cache, skipped)
            logits = self._logits(target, states, begun)[0]
            last, q = draw(logits)
            proposed.append(last)
            drawn_from.append(q)
            self._begun.append(begun)
            if len(proposed) == num_tokens or (go_on is not None and not go_on(confidence(logits))):
                break
        cache.length = start
        return Proposal.chain(proposed, drawn_from, target.device)

    def _logits(self, target: Decoder, states: Tensor, begun: Begun) -> Tensor:
        """[n, V] of what follows rows, from what `Decoder.partial` returned of them."""
        return target.logits(states)


class TreeDrafter(Drafter):
    """One that is an `Expander` too."""

    def expand(self, token_ids: Sequence[int], parents: Sequence[int], nodes: Sequence[int]) -> Tensor:
        """See `models.drafting.drafters.Expander`; reads the nodes' paths anew."""
        target, cache = self.target_and_cache()
        start = cache.length
        tokens, above, rows = lay_out(self.known[-1:], token_ids, parents, nodes)
        states, _ = target.partial(torch.tensor(tokens, device=target.device), cache, self.draft.skipped, above)
        cache.length = start
        self._begun = []  # a tree's rows may come in another order
        return target.logits(states[rows]).log_softmax(-1)


class SelfFormat(Format):
    """The directory of such a family: as of one without weights, but a draft knows its target."""

    def create(self, params: BaseParams, target_dir: Path, token_counts: np.ndarray) -> SelfDraft:
        """Make a draft for a target; `token_counts` are not read.

        Raises:
            ValueError: the target's layers are not of Llama's layout, or `params` don't fit them.
        """
        model_type = AutoConfig.from_pretrained(target_dir).model_type
        if model_type not in MODEL_TYPES:
            raise ValueError(f"{params.name} takes targets of {', '.join(MODEL_TYPES)}; got {model_type}")
        return self._of(super().create(params, target_dir, token_counts), target_dir)

    def load(self, directory: Path, target_dir: Path) -> SelfDraft:
        """Read a draft back; ValueError as `check`."""
        return self._of(super().load(directory, target_dir), target_dir)

    def check(self, directory: Path, like: Path | None, target: TargetCard) -> None:
        """Raise ValueError if the draft was made for another target, or does not fit its layers or the served one."""
        super().check(directory, like, target)
        try:
            self._read(directory)
        except ValueError as error:
            raise ValueError(f"draft {directory.name}: {error}") from error

    def _new_config(self, params: BaseParams, card: TargetCard) -> dict[str, Any]:
        return super()._new_config(params, card) | {"num_hidden_layers": card.num_layers}

    def _of(self, draft: Weightless, target_dir: Path) -> SelfDraft:
        found = cast("SelfDraft", draft)
        found.target_dir = target_dir
        return found


def read_aside(target: Decoder, token_ids: Tensor, cache: Cache, start: int, skipped: Sublayers) -> Tensor:
    """Read tokens through a part of the target, and leave the cache as it was.

    Args:
        target: whose part.
        token_ids: [n] int64.
        cache: of the target, with what comes before them.
        start: how many of its tokens come before them.
        skipped: what is left out.

    Returns:
        [n, H] last hidden states, normed.
    """
    length, places = cache.length, slice(start, start + len(token_ids))
    kept = cache.keys[:, :, places].clone(), cache.values[:, :, places].clone()
    cache.length = start
    states, _ = target.partial(token_ids, cache, skipped)
    cache.keys[:, :, places], cache.values[:, :, places] = kept
    cache.length = length
    return states


def read_ahead(
    target: Decoder, token_ids: Tensor, cache: Cache, starts: Sequence[int], num_tokens: int, skipped: Sublayers
) -> Tensor:
    """Read what follows several places of a text through a part of the target, each after the target's own keys.

    Args:
        target: whose part.
        token_ids: [T] int64, the text.
        cache: of the target, with the text up to the last start at least, and room for what is read; it stays so long.
        starts: places, from 0.
        num_tokens: read from each.
        skipped: what is left out.

    Returns:
        [starts, num_tokens, H] last hidden states, normed.
    """
    length = cache.length
    parents = [
        start - 1 - length if step == 0 else row * num_tokens + step - 1
        for row, start in enumerate(starts)
        for step in range(num_tokens)
    ]
    read = torch.stack([token_ids[start : start + num_tokens] for start in starts])
    states, _ = target.partial(read.flatten(), cache, skipped, parents)
    cache.length = length
    return states.view(*read.shape, -1)


def require_part(skipped: Sublayers, num_layers: int) -> None:
    """Raise ValueError if a part leaves out layers that a target of so many has not, or nothing, or everything."""
    for kind, numbers in skipped._asdict().items():
        if outside := [number for number in sorted(numbers) if not 0 <= number < num_layers]:
            raise ValueError(
                f"{kind} of layer {outside[0]} can't be skipped; the target has layers 0 to {num_layers - 1}"
            )
    num_skipped = sum(map(len, skipped))
    if not 0 < num_skipped < 2 * num_layers:
        raise ValueError(
            f"{num_skipped} sublayers are skipped; wanted 1 to {2 * num_layers - 1} of the target's, so that some run"
        )
