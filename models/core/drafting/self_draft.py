"""Draft families that are the target itself, without some of its sublayers: a draft is a config.json.

Tokens that are certain are read from the target's own keys and values, as in Draft & Verify and SWIFT: nothing of a
prompt or of an accepted token is computed for the draft, and what a drafted token sees of them is better than what the
part would have made. Keys and values of drafted tokens stand behind them in the same cache until the target's pass
writes its own in their place. Layers before the first that lacks a sublayer read what the target reads, so their
states are handed on to the target's pass, which need not go through them again (`models.core.layers.decoder.Begun`).
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from models.core.drafting.draft_format import require_llama_layout
from models.core.drafting.drafters import draft_chain, step_by_step
from models.core.drafting.proposal import Proposal
from models.core.drafting.weightless import Format, Kind, Weightless
from models.core.layers.decoder import Begun, Cache, Decoder, Sublayers
from models.drafts import Draft, Draw, GoOn, KeepRows, Rows, Unrolled
from models.params import BaseParams
from models.targets import TargetCard, describe, target_config
from models.trees import lay_out


class TargetRunner(Draft):
    """A draft that runs layers of the target.

    Attributes:
        target_dir: of the target.
        skipped: what it leaves out of the target where it is a part of it; neither nothing nor everything.
    """

    target_dir: Path
    skipped: Sublayers
    any_layout = False
    _decoder: Decoder | None = None

    def borrow(self, target_dir: Path) -> Self:
        self.target_dir = target_dir
        return self

    def decoder(self) -> Decoder:
        """Return a copy of the target in float32, for whoever asks outside of an engine."""
        device = str(self.vocabulary.device)
        if self._decoder is None or self._decoder.device != device:
            self._decoder = Decoder.load(self.target_dir, torch.float32, device)
        return self._decoder


class SelfDraft(TargetRunner, Weightless):
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
        """Yield [num_tokens, H] that it makes of a text [T] from each start on, after the target's keys before it."""
        cache = Cache(target, max(starts) + len(starts) * num_tokens)
        target.forward(token_ids[: max(starts)], cache)
        yield from read_ahead(target, token_ids, cache, starts, num_tokens, self.skipped)

    def drafter(self, max_len: int) -> "TreeDrafter":
        return TreeDrafter(self, max_len)


class Drafter:
    """See `models.drafts.Drafter` and `SelfDrafter`; it has a target of its own until one is shared.

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
        self._begun: list[Begun] = []

    def share(self, target: Decoder, cache: Cache) -> None:
        """See `models.core.drafting.drafters.SelfDrafter`."""
        self._shared = target, cache

    def begun(self) -> Begun | None:
        """See `models.core.drafting.drafters.SelfDrafter`."""
        whole = {begun.num_layers for begun in self._begun}
        return Begun(whole.pop(), torch.cat([one.states for one in self._begun])) if whole - {0} else None

    def extend(self, token_ids: Tensor, hidden: Tensor) -> None:
        if not self.known:
            self.num_asked = len(token_ids) - 1
        self.known += token_ids.tolist()[1 if self.known else 0 :]
        self._begun = []

    def target_and_cache(self) -> tuple[Decoder, Cache]:
        """Return what it drafts with; the cache holds all that is certain but the last token."""
        if self._shared is None:
            target = self.draft.decoder()
            self._shared = target, Cache(target, self._max_len)
        target, cache = self._shared
        if unread := self.known[cache.length : -1]:
            target.forward(torch.tensor(unread, device=target.device), cache)
        return target, cache

    def propose(self, num_tokens: int, draw: Draw, go_on: GoOn | None = None) -> Proposal:
        target, cache = self.target_and_cache()
        start, self._begun = cache.length, []

        def after(proposed: list[int]) -> Tensor:
            last = torch.tensor([*self.known[-1:], *proposed][-1:], device=target.device)
            states, begun = target.partial(last, cache, self.draft.skipped)
            logits = self._logits(target, states, begun)[0]  # which asks how many have begun
            self._begun.append(begun)
            return logits

        proposal = draft_chain(after, num_tokens, draw, go_on, target.device)
        cache.length = start
        return proposal

    def _logits(self, target: Decoder, states: Tensor, begun: Begun) -> Tensor:
        """[n, V] of what follows rows, from what `Decoder.partial` returned of them."""
        return target.logits(states)


class TreeDrafter(Drafter):
    """One that is an `Expander` too."""

    def expand(self, token_ids: Sequence[int], parents: Sequence[int], nodes: Sequence[int]) -> Tensor:
        """See `models.core.drafting.drafters.Expander`; reads the nodes' paths anew."""
        target, cache = self.target_and_cache()
        start = cache.length
        tokens, above, rows = lay_out(self.known[-1:], token_ids, parents, nodes)
        states, _ = target.partial(torch.tensor(tokens, device=target.device), cache, self.draft.skipped, above)
        cache.length = start
        self._begun = []  # a tree's rows may come in another order
        return target.logits(states[rows]).log_softmax(-1)


class SelfFormat(Format[Kind]):
    """The directory of such a family: as of one without weights, but a draft knows its target."""

    def create(self, params: BaseParams, target_dir: Path, token_counts: np.ndarray) -> Kind:
        """See the base; ValueError if the target's layers are not of Llama's layout, or `params` don't fit them."""
        require_llama_layout(target_config(target_dir).model_type, params.name)
        return super().create(params, target_dir, token_counts)

    def check(self, directory: Path, like: Path | None, target: TargetCard) -> None:
        """Raise ValueError if the draft was made for another target, or does not fit its layers or the served one."""
        super().check(directory, like, target)
        try:
            self._draft(self.read(directory))
        except ValueError as error:
            raise ValueError(f"draft {directory.name}: {error}") from error

    def config(self, own: Mapping[str, Any], target_dir: Path) -> dict[str, Any]:
        return super().config({**own, "num_hidden_layers": describe(target_dir).num_layers}, target_dir)


def read_aside(target: Decoder, token_ids: Tensor, cache: Cache, start: int, skipped: Sublayers) -> Tensor:
    """Read tokens [n] through a part of the target behind the first `start` of a cache, which stays as it was.

    Returns [n, H] last hidden states, normed.
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
    """Read what follows several places of a text [T] through a part of the target, each after the target's own keys.

    The cache holds the text up to the last start at least, with room for what is read; it stays so long. Returns
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


def after_exit(exit_layer: Any, num_layers: int) -> Sublayers:
    """Return the sublayers of a target's layers behind an exit; ValueError if it is not before the last of them."""
    if type(exit_layer) is not int or not 1 <= exit_layer < num_layers:
        raise ValueError(
            f"exit_layer must be 1 to {num_layers - 1}, before the last of the target's layers; got {exit_layer}"
        )
    rest = frozenset(range(exit_layer, num_layers))
    return Sublayers(rest, rest)


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
