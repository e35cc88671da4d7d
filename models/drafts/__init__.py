"""Draft families. A file here holds a draft's torch module and its directory format, exactly as the engine loads it.

Letters: B sequences, T tokens of a sequence, N rows with a loss, H hidden width, A tapped target layers, V target
vocabulary, D draft vocabulary, K drafted tokens a step.

A family's module has

- `ARCHITECTURES`: what config.json may say, and `vllm_config(directory)`: what vLLM's speculative_config says;
- `TRAINED`: whether there are weights to learn; without them the directory is a config.json alone, and only `create`,
  `save`, `load` and `check` are called;
- `create(params, target_dir, token_counts)`, `renew(draft, target_dir, token_counts)`, `save(draft, directory)`,
  `load(directory, target_dir)`: make a draft, let it follow the traffic's tokens, and keep it;
- `check(directory, like, target)`: all that can be said against a directory before an engine reads it, as ValueError;
- `adopt(directory, target_dir)`, in families of which others publish drafts: a draft out of such a directory, for a
  target.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from models import catalog
from models.targets import TargetCard

# logits [D] of the next token → its index in them.
Pick = Callable[[Tensor], int]
# (step, row numbers [n], logits [n, D]) → [n] whether the row is unrolled further.
KeepRows = Callable[[int, Tensor, Tensor], Tensor]
Shapes = dict[str, tuple[tuple[int, ...], torch.dtype]]


class Rows(NamedTuple):
    """A packed batch: row n has seen `token_ids[sequence[n], : index[n] + 2]` and drafts what follows."""

    hidden: Tensor  # [B, T, A·H] the target's tapped hidden states
    token_ids: Tensor  # [B, T+K] padded
    sequence: Tensor
    index: Tensor


class Drafter(Protocol):
    """One sequence's drafting, with its cache.

    Attributes:
        draft: whose weights are used; may be set to another of the same shape between two calls.
    """

    draft: Any

    def extend(self, token_ids: Tensor, hidden: Tensor) -> None:
        """Take in what is certain.

        Args:
            token_ids: [n+1] int64, the token that `hidden` begins at and n tokens after it.
            hidden: [n, A·H] the target's tapped states of all but the last.
        """

    def propose(self, num_tokens: int, pick: Pick) -> tuple[list[int], Tensor | None]:
        """Draft at most `num_tokens` tokens after the last certain one.

        Returns:
            target ids, and the logits [n, D] that they were picked from; None for a draft that is certain.
        """


class Draft(nn.Module, ABC):
    """What training, scoring and the reference engine ask of a draft.

    Attributes:
        taps: residual streams of the target that it reads, counted as layers done, ascending; may be empty.
        vocabulary: [D] target ids of its tokens, ascending.
        max_unroll: steps that differ in training, None for all; 1 where a drafted token that was right is like one that
            was read.
    """

    max_unroll: int | None = None

    @property
    @abstractmethod
    def taps(self) -> tuple[int, ...]: ...

    @property
    @abstractmethod
    def vocabulary(self) -> Tensor: ...

    @abstractmethod
    def unroll(self, rows: Rows, num_steps: int, keep: KeepRows | None = None) -> list[tuple[Tensor, Tensor]]:
        """Draft `num_steps` tokens from every row, fed with the tokens that really came.

        Args:
            rows: the packed batch.
            num_steps: K.
            keep: says after each step which rows go on; all of them if None.

        Returns:
            for each step the row numbers [n] that ran and their logits [n, D].
        """

    @abstractmethod
    def drafter(self, max_len: int) -> Drafter:
        """Return a drafter for a sequence of at most `max_len` tokens."""


def family_of(directory: Path) -> ModuleType:
    """Return the module of the family that a draft directory belongs to.

    Raises:
        ValueError: there is no config.json, or no family is of its architecture.
    """
    architectures = read_json(directory / "config.json").get("architectures") or []
    modules = map(partial(catalog.load, "drafts"), catalog.names("drafts"))
    families = {architecture: module for module in modules for architecture in module.ARCHITECTURES}
    if len(architectures) != 1 or architectures[0] not in families:
        raise ValueError(f"draft {directory.name} is of architecture {architectures}; there are: {', '.join(families)}")
    return families[architectures[0]]


def open_draft(directory: Path, target_dir: Path) -> "Draft":
    """Load a draft of whatever family; ValueError as the family's `check`."""
    draft: Draft = family_of(directory).load(directory, target_dir)
    return draft


def read_config(directory: Path, architectures: Sequence[str]) -> dict[str, Any]:
    """Read a draft's config.json.

    Raises:
        ValueError: it can't be read, or is of another architecture than the family's.
    """
    config = read_json(directory / "config.json")
    if config.get("architectures") not in [[architecture] for architecture in architectures]:
        raise ValueError(
            f"draft {directory.name} is of architecture {config.get('architectures')}; "
            f"wanted {' or '.join(architectures)}"
        )
    return config


def read_json(file: Path) -> dict[str, Any]:
    """Read a JSON object; ValueError if it can't be read or is something else."""
    try:
        value = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"draft {file.parent.name}: {file.name} can't be read: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"draft {file.parent.name}: {file.name} holds a {type(value).__name__}, wanted an object")
    return value


def check_config(config: dict[str, Any], directory: Path, like: dict[str, Any] | None, target: TargetCard) -> None:
    """Raise ValueError if a draft is not the target's, or can't be swapped in for the one of config `like`."""
    check_made_for(config, directory, target)
    if config.get("vocab_size") != target.vocab_size:
        raise ValueError(
            f"draft {directory.name} has vocab_size {config.get('vocab_size')}, the target has {target.vocab_size}"
        )
    if like is not None:
        changed = sorted(key for key in config.keys() | like.keys() if config.get(key) != like.get(key))
        fixed = [key for key in changed if key != "redraft"]
        if fixed:
            raise ValueError(
                f"draft {directory.name} differs from the served draft in {', '.join(fixed)}; a swap can't change it"
            )


def check_made_for(config: dict[str, Any], directory: Path, target: TargetCard) -> None:
    """Raise ValueError if a draft says that it was made for another target; one from elsewhere says nothing."""
    made_for = config.get("redraft", {})
    for key, served in (("target_sha256", target.sha256), ("tokenizer_sha256", target.tokenizer_sha256)):
        if key in made_for and made_for[key] != served:
            raise ValueError(
                f"draft {directory.name} was made for {key} {made_for[key][:12]}…, the target has {served[:12]}…"
            )


def require_tensors(tensors: dict[str, Tensor], wanted: Shapes) -> None:
    """Raise ValueError naming a tensor that is missing, extra, of another shape or dtype, or not finite."""
    for name in sorted(wanted.keys() - tensors.keys()):
        raise ValueError(f"tensor {name} is missing")
    for name in sorted(tensors.keys() - wanted.keys()):
        raise ValueError(f"tensor {name} is not one of this draft's")
    for name, (shape, dtype) in wanted.items():
        got = tensors[name]
        if tuple(got.shape) != shape or got.dtype != dtype:
            raise ValueError(f"tensor {name} is {got.dtype} {list(got.shape)}; wanted {dtype} {list(shape)}")
        if got.is_floating_point() and not bool(torch.isfinite(got).all()):
            raise ValueError(f"tensor {name} holds NaN or infinite values")


def made_for(target: TargetCard) -> dict[str, str]:
    """Return what a draft's config keeps of its target under "redraft"."""
    return {"target_sha256": target.sha256, "tokenizer_sha256": target.tokenizer_sha256}
