"""The directory of a draft that has weights of its own and borrows others of the target, which are never saved.

A family's file makes one `Format`, whose functions are those of `models.drafts.Family` that such families share.
Tensors are bfloat16. Where the draft's tokens are a part of the target's, `token_map` names them, or `d2t` as offsets.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from models.core.checkpoints.checkpoint import read_stored, tensor_names
from models.core.drafting.draft_files import (
    WEIGHTS,
    Shapes,
    check_config,
    fused,
    made_for,
    read_config,
    require_tensors,
    require_vocabulary,
    write_config,
)
from models.drafts import Draft, EngineWeights
from models.targets import TargetCard, describe

HEAD_SIZES = ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size")
LAYER_SIZES = (*HEAD_SIZES, "intermediate_size", "draft_vocab_size")

Kind = TypeVar("Kind", bound=Draft)


def engine_weights(directory: Path) -> EngineWeights:
    """Return a draft's file, whose tensors have vLLM's names."""
    file = directory / WEIGHTS
    return EngineWeights(file, fused({name: name for name in tensor_names(file)}))


class Format(Generic[Kind]):
    """See the module; `draft` makes one of a config, its `sizes` are numbers from 1."""

    def __init__(
        self,
        family: str,
        architectures: tuple[str, ...],
        draft: Callable[[dict[str, Any]], Kind],
        sizes: Sequence[str] = LAYER_SIZES,
    ) -> None:
        self._family, self._architectures, self._draft, self._sizes = family, architectures, draft, sizes

    def config(self, own: Mapping[str, Any], target_dir: Path) -> dict[str, Any]:
        """Return the config.json of a draft for a target, with what is its own, be it another architecture."""
        return {"architectures": [self._architectures[0]], "redraft": made_for(describe(target_dir)), **own}

    def read(self, directory: Path) -> dict[str, Any]:
        """Return a draft's config.json; ValueError if it is not such a draft's."""
        return read_config(directory, self._family, self._architectures)

    def new(self, own: Mapping[str, Any], target_dir: Path) -> Kind:
        """Make a draft of such a config with what it borrows, its own weights without values."""
        return self._draft(self.config(own, target_dir)).borrow(target_dir)

    def renew(self, draft: Kind, target_dir: Path, token_counts: np.ndarray) -> Kind:
        """Return the draft as it is: its vocabulary stays."""
        return draft

    def save(self, draft: Kind, directory: Path) -> None:
        """Write config.json and, of a draft with weights, bfloat16 safetensors into `directory`."""
        tensors = {
            name: tensor.detach().to(torch.bfloat16 if tensor.is_floating_point() else tensor.dtype).contiguous().cpu()
            for name, tensor in draft.state_dict().items()
        }
        if tensors:
            save_file(tensors, directory / WEIGHTS, metadata={"format": "pt"})
        write_config(draft.config, self._family, directory)

    def load(self, directory: Path, target_dir: Path) -> Kind:
        """Read a draft back, in float32; ValueError as `check`."""
        self.check(directory, like=None, target=describe(target_dir))
        draft = self._draft(self.read(directory))
        if draft.state_dict():
            draft.load_state_dict(load_file(directory / WEIGHTS))
        return draft.float().borrow(target_dir)

    def check(self, directory: Path, like: Path | None, target: TargetCard) -> None:
        """See `models.drafts.Family`; a vocabulary that is no ascending part of the target's is refused as well."""
        config = self.read(directory)
        for key in self._sizes:
            if not isinstance(config.get(key), int) or config[key] < 1:
                raise ValueError(f"draft {directory.name} has {key} {config.get(key)!r}; wanted a number from 1")
        if config["hidden_size"] != target.hidden_size:
            raise ValueError(
                f"draft {directory.name} has hidden_size {config['hidden_size']}, the target has {target.hidden_size}"
            )
        served = None if like is None else self.read(like)
        check_config(config, directory, served, target)
        self.require_fit(read_stored(directory), config)

    def require_fit(self, tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        """Raise ValueError unless tensors are such a draft's, its vocabulary an ascending part of the target's."""
        require_tensors(tensors, self.expected_shapes(config))
        if "token_map" in tensors:
            require_vocabulary("token_map", tensors["token_map"], config["vocab_size"])
        if "d2t" in tensors:
            require_vocabulary("d2t", tensors["d2t"] + torch.arange(len(tensors["d2t"])), config["vocab_size"])

    def expected_shapes(self, config: dict[str, Any]) -> Shapes:
        """Return shape and dtype of every tensor of a checkpoint."""
        with torch.device("meta"):
            draft = self._draft(config)
        dtype = getattr(torch, str(config.get("dtype", "bfloat16")), torch.bfloat16)
        tensors = draft.state_dict().items()
        return {name: (tuple(t.shape), dtype if t.is_floating_point() else t.dtype) for name, t in tensors}

    def vllm_config(self, directory: Path) -> dict[str, Any]:
        """Raise a ValueError: the engine that serves can't draft with it."""
        raise ValueError(f'vLLM can\'t draft with family {self._family}; engine "torch" can')

    def vllm_weights(self, directory: Path) -> None:
        """Return None: nothing is swapped."""
