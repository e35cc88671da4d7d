"""The directory of a draft that has weights of its own and borrows others of the target, which are never saved.

A family's file makes one `Format`, whose functions are those of `models.drafts.Family` that such families share.
Tensors are bfloat16; `token_map` names the draft's tokens where they are a part of the target's.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Generic, Protocol, Self, TypeVar

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from models.checkpoints.checkpoint import read_stored
from models.drafting.draft_files import (
    Shapes,
    check_config,
    read_config,
    require_tensors,
    require_vocabulary,
    write_config,
)
from models.targets import TargetCard, describe

WEIGHTS = "model.safetensors"


class Borrower(Protocol):
    """A module that says what it is by a config, and takes over what is the target's."""

    config: dict[str, Any]

    def borrow(self, target_dir: Path) -> Self:
        """Take over what is the target's and never trained or saved; return the draft."""

    def float(self) -> Self:
        """Return the draft in float32."""

    def state_dict(self) -> dict[str, Any]:
        """Return the tensors by name."""

    def load_state_dict(self, state_dict: dict[str, Tensor]) -> Any:
        """Take tensors by name."""


Kind = TypeVar("Kind", bound=Borrower)


class Format(Generic[Kind]):
    """See the module; `draft` makes one of a config, its `sizes` are numbers from 1."""

    def __init__(
        self,
        family: str,
        architectures: tuple[str, ...],
        draft: Callable[[dict[str, Any]], Kind],
        sizes: Sequence[str],
    ) -> None:
        self._family, self._architectures, self._draft, self._sizes = family, architectures, draft, sizes

    def save(self, draft: Kind, directory: Path) -> None:
        """Write config.json and bfloat16 safetensors into `directory`."""
        tensors = {
            name: tensor.detach().to(torch.bfloat16 if tensor.is_floating_point() else tensor.dtype).contiguous().cpu()
            for name, tensor in draft.state_dict().items()
        }
        save_file(tensors, directory / WEIGHTS, metadata={"format": "pt"})
        write_config(draft.config, self._family, directory)

    def load(self, directory: Path, target_dir: Path) -> Kind:
        """Read a draft back, in float32; ValueError as `check`."""
        self.check(directory, like=None, target=describe(target_dir))
        draft = self._draft(read_config(directory, self._family, self._architectures))
        draft.load_state_dict(load_file(directory / WEIGHTS))
        return draft.float().borrow(target_dir)

    def check(self, directory: Path, like: Path | None, target: TargetCard) -> None:
        """See `models.drafts.Family`; a vocabulary that is no ascending part of the target's is refused as well."""
        config = read_config(directory, self._family, self._architectures)
        for key in self._sizes:
            if not isinstance(config.get(key), int) or config[key] < 1:
                raise ValueError(f"draft {directory.name} has {key} {config.get(key)!r}; wanted a number from 1")
        if config["hidden_size"] != target.hidden_size:
            raise ValueError(
                f"draft {directory.name} has hidden_size {config['hidden_size']}, the target has {target.hidden_size}"
            )
        served = None if like is None else read_config(like, self._family, self._architectures)
        check_config(config, directory, served, target)
        tensors = read_stored(directory)
        require_tensors(tensors, self.expected_shapes(config))
        if "token_map" in tensors:
            require_vocabulary("token_map", tensors["token_map"], config["vocab_size"])

    def expected_shapes(self, config: dict[str, Any]) -> Shapes:
        """Return shape and dtype of every tensor of a checkpoint."""
        with torch.device("meta"):
            draft = self._draft(config)
        return {
            name: (tuple(tensor.shape), torch.bfloat16 if tensor.is_floating_point() else tensor.dtype)
            for name, tensor in draft.state_dict().items()
        }

    def vllm_config(self, directory: Path) -> dict[str, Any]:
        """Raise a ValueError: the engine that serves can't draft with it."""
        raise ValueError(f'vLLM can\'t draft with family {self._family}; engine "torch" can')

    def vllm_weights(self, directory: Path) -> None:
        """Return None: nothing is swapped."""
