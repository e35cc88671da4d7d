"""Draft families. A file here holds a draft's torch module and its directory format, exactly as the engine loads it.

Letters: B sequences, T tokens of a sequence, N rows with a loss, H hidden width, A tapped target layers, V target
vocabulary, D draft vocabulary, K drafted tokens a step.

A family's module is a `Family`: what it offers, and all that is its own, is said there. One that reads what others
publish is an `Adopter` as well. One whose drafts hold smaller ones has `cut(draft, num_layers)`; one of which vLLM can
compute some drafts alone has `require_served(params, num_draft_tokens)`, whose ValueError says what to set; one that
asks more of a target than a layout has `require_target(params, config)`; one that is fitted to the target's answers by
a search has `search`. `models.core.drafting.draft_families` finds a directory's.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, Self

import numpy as np
import torch
from torch import Tensor, nn

from models.core.drafting.proposal import Proposal
from models.core.layers.kernels import pack
from models.params import BaseParams
from models.targets import TargetCard

# Logits [D] of the next token → a target id drawn from them, and what it was drawn from: q [V] at the sampling settings
# of the request, or None where no chance was in it. Further draws from the same logits are independent.
Draw = Callable[[Tensor], tuple[int, Tensor | None]]
# How sure the draft is of what it drafted last, from 0 to 1 → whether it is to draft on.
GoOn = Callable[[float], bool]
# (step, row numbers [n], logits [n, D]) → [n] whether the row is unrolled further.
KeepRows = Callable[[int, Tensor, Tensor], Tensor]


class Procedure(NamedTuple):
    """How a family is trained by its paper; a recipe that says otherwise goes before."""

    loss: BaseParams  # what is minimised
    follow: Literal["accepted", "all"] = "accepted"  # rows that are unrolled further, those right so far or every one
    step_decay: float = 0.8  # weight of unroll j is step_decay ** j


class Rows(NamedTuple):
    """A packed batch: row n has seen `token_ids[sequence[n], : index[n] + 2]` and drafts what follows."""

    hidden: Tensor  # [B, T, A·H] the target's tapped hidden states
    token_ids: Tensor  # [B, T+K] padded
    sequence: Tensor
    index: Tensor  # type: ignore[assignment]  # it hides tuple.index, which nobody asks of rows
    rng: torch.Generator | None = None  # what training draws noise from, on the states' device; None outside of it
    done: float = 0.0  # share of the training that is behind it


class Unrolled(NamedTuple):
    running: Tensor  # [n] the row numbers that ran
    logits: Tensor  # [n, D]
    hidden: Tensor | None = None  # [n, H] its guess of what the target's output matrix multiplies; None where none
    added: Tensor | None = None  # [n] what the family adds to the loss of each row in training


class Drafter(Protocol):
    """One sequence's drafting, with its cache; `models.core.drafting.drafters` has what some of them can do besides."""

    draft: Any  # whose weights are used; may be set to another of the same shape between two calls

    def extend(self, token_ids: Tensor, hidden: Tensor) -> None:
        """Take in what is certain. A drafted token that was accepted comes again, with the target's states on its path.
        `token_ids` [n+1] int64 are the token that `hidden` [n, A·H], tapped states, begins at and n tokens after it."""

    def propose(self, num_tokens: int, draw: Draw, go_on: GoOn | None = None) -> Proposal:
        """Draft at most `num_tokens` tokens, from 1, after the last certain one, of all branches together: one block.

        `draw` chooses tokens, so that they follow the request's sampling settings. `go_on` is asked after each pass of
        the draft but the last, with its `confidence` or a better guess of the family's own.
        """


class Draft(nn.Module, ABC):
    """What training, scoring and the reference engine ask of a draft."""

    config: Any  # as in config.json, where it has weights or settings
    procedure: ClassVar[Procedure | None] = None  # how it is trained; None where there are no weights to learn
    max_depth: int | None = None  # tokens after the last certain one that it can draft, None for any number
    max_unroll: int | None = (
        None  # steps that differ in training, None for all; 1 where right tokens are like read ones
    )
    replayable: bool = True  # what it drafts follows from the text and the tapped states; else `unroll` is a ValueError
    branches: bool = False  # whether its drafters propose likeliest siblings by themselves
    expands: bool = False  # whether its drafters are `Expander`s, so that trees can be grown
    any_layout: bool = False  # whether its target may be of any layout, not only of Llama's
    asks: bool = True  # whether its drafters ask `go_on`; not those that make no pass

    @property
    def taps(self) -> tuple[int, ...]:
        """Residual streams of the target that it reads, counted as layers done, ascending; none in some families."""
        return ()

    @property
    @abstractmethod
    def vocabulary(self) -> Tensor:
        """[D] target ids of its tokens, ascending."""

    def borrow(self, target_dir: Path) -> Self:
        """Take over what is the target's and never trained or saved, nothing in some families; return the draft."""
        return self

    @property
    def nested(self) -> tuple[int, ...]:
        """How many of its first layers are a draft of their own each, ascending; none in most families."""
        return ()

    def num_unrolled(self, num_draft_tokens: int) -> int:
        """Return how many steps training unrolls where `num_draft_tokens` are served: as many that differ."""
        return min(num_draft_tokens, self.max_unroll or num_draft_tokens)

    def num_vectors(self, num_tokens: int) -> int:
        """Return the most vectors that the target reads beside `num_tokens` drafted tokens for a `QueryingDrafter`."""
        return 0

    @abstractmethod
    def unroll(self, rows: Rows, num_steps: int, keep: KeepRows | None = None) -> list[Unrolled]:
        """Draft `num_steps` tokens from every row, fed with the tokens that really came; fewer where it can't go on.

        `keep` says after each step which rows go on, all of them if None. ValueError if the rows' states are not as
        wide as what it reads.
        """

    def unroll_all(self, rows: Rows, num_steps: int, keep: KeepRows | None = None) -> list[list[Unrolled]]:
        """Unroll the draft as `unroll` does, and after it each draft that is nested in it; training learns them all."""
        return [self.unroll(rows, num_steps, keep)]

    @property
    def unrounded(self) -> Sequence[nn.Module]:
        """Layers that int8 would spoil: they read residual streams, of which a few features are far the largest."""
        return ()

    def pack(self, dtype: torch.dtype) -> Self:
        """Multiply in `dtype` from now on, laid out for a drafter's few rows; it is trained and moved no more."""
        pack(self, dtype, self.unrounded)
        return self

    @abstractmethod
    def drafter(self, max_len: int) -> Drafter:
        """Return a drafter for a sequence of at most `max_len` tokens."""


def confidence(logits: Tensor) -> float:
    """Return the highest probability that a draft gives, [D] logits taken at temperature 1."""
    return float(logits.float().softmax(-1).max())


class EngineWeights(NamedTuple):
    """What vLLM loads of a draft when it is swapped in: a safetensors file, and each parameter of vLLM's module to the
    file's tensors that it is stacked of, in order.

    Every tensor of the file is in it once; one whose module turns out to be the target's own is left alone.
    """

    file: Path
    parameters: dict[str, tuple[str, ...]]


class Family(Protocol):
    """What the module of a draft family offers; `draft` is the family's own subclass of `Draft`."""

    @property
    def PAPER(self) -> str:
        """Where it comes from."""

    @property
    def ARCHITECTURES(self) -> tuple[str, ...]:
        """What `architectures` of its config.json may say; another family may say the same."""

    @property
    def SERVED(self) -> bool:
        """Whether vLLM drafts with it; the reference engine drafts with every family.

        A family that vLLM knows and can't serve here says in `UNSERVED` why; one with which it drafts the same number
        of tokens in each step and looks nothing up has `FIXED_K`.
        """

    @property
    def Params(self) -> type[BaseParams]:
        """The shape of a new draft."""

    def create(self, params: Any, target_dir: Path, token_counts: np.ndarray) -> Draft:
        """Make a draft for a target; ValueError if it is of a layout that the family can't take, or `params` don't fit.
        `token_counts` [V] is how often each target token occurs in the traffic."""

    def renew(self, draft: Any, target_dir: Path, token_counts: np.ndarray) -> Draft:
        """Let a draft follow the traffic's tokens, before it is trained again."""

    def save(self, draft: Any, directory: Path) -> None:
        """Write the draft as the engine loads it, config.json by `models.core.drafting.draft_format.write_config`."""

    def load(self, directory: Path, target_dir: Path) -> Draft:
        """Read a draft back, in float32; ValueError as `check`."""

    def check(self, directory: Path, like: Path | None, target: TargetCard) -> None:
        """Say all that can be said against a draft before an engine reads it.

        Shapes must equal those of `like`, a draft that is served, because they can't change in a swap. ValueError: a
        file that can't be read; a tensor missing, extra, of another shape or dtype, or not finite; a draft that was
        made for another target or tokenizer, or that can't be swapped in for `like`.
        """

    def vllm_config(self, directory: Path) -> dict[str, Any]:
        """Return what vLLM's speculative_config says of this draft, K with it where no other is possible; ValueError if
        the family is not `SERVED`, or vLLM can't compute this draft."""

    def vllm_weights(self, directory: Path) -> EngineWeights | None:
        """Return what vLLM loads in a swap, None where it loads nothing; ValueError if it can't be read."""


class Collector(Family, Protocol):
    """A family that drafts from texts which it keeps."""

    def collect(self, draft: Any, texts: Sequence[Sequence[int]]) -> None:
        """Keep texts, token ids of each, in place of those that a draft kept; ValueError at one of no vocabulary."""


class Publisher(Family, Protocol):
    """A family whose drafts vLLM serves without redraft, in a layout of their own."""

    def publish(self, directory: Path, into: Path, target: Mapping[str, Any], num_draft_tokens: int) -> None:
        """Write a draft so that `vllm serve INTO` serves it with its target, K tokens a step unless it is told another.
        `into` is empty; `target` has `name_or_path`, a directory or a hub's id, and `architectures`."""


class Adopter(Family, Protocol):
    """A family of which others publish drafts."""

    def publishes(self, config: Mapping[str, Any]) -> bool:
        """Whether a config.json is that of a draft in a layout that `adopt` reads."""

    def adopt(self, directory: Path, target_dir: Path) -> Draft:
        """Take a draft that somebody else trained: config.json, safetensors files, and a tokenizer.json if it has one;
        ValueError if it does not fit the target, or is of a shape that is not supported; names what does not fit."""

    def context(self, directory: Path) -> int | None:
        """Return how many tokens of a text a published draft says that it was made for, None where it does not."""

    def readings(self, draft: Draft, directory: Path, target_dir: Path) -> Mapping[str, Draft]:
        """Return what an adopted draft may be as far as its files tell, by what differs: itself first, or alone."""
