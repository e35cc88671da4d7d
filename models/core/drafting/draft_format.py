"""The directory of a draft: its config.json, which says family and target, and what its tensors must be.

A family whose drafts have weights of their own and borrow others of the target, which are never saved, makes one
`Format`, whose functions are those of `models.drafts.Family` that such families share. Tensors are bfloat16. Where the
draft's tokens are a part of the target's, `token_map` names them, or `d2t` as offsets.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from models.core.checkpoints.loading import read_stored, tensor_names
from models.core.drafting.draft_families import own, read_json
from models.drafts import Draft, EngineWeights
from models.params import BaseParams, validate
from models.targets import MODEL_TYPES, TargetCard, describe

WEIGHTS = "model.safetensors"
Shapes = dict[str, tuple[tuple[int, ...], torch.dtype]]
# What vLLM's layers of the Llama kind keep as one matrix, in its order.
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
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


def read_config(directory: Path, family: str, architectures: Sequence[str]) -> dict[str, Any]:
    """Read a draft's config.json.

    Raises:
        ValueError: it can't be read, or is of another family or of another architecture than the family's.
    """
    config = read_json(directory / "config.json")
    named = own(config, directory).get("family", family)
    if named != family:
        raise ValueError(f"draft {directory.name} is of family {named!r}; wanted {family!r}")
    if config.get("architectures") not in [[architecture] for architecture in architectures]:
        raise ValueError(
            f"draft {directory.name} is of architecture {config.get('architectures')}; "
            f"wanted {' or '.join(architectures)}"
        )
    return config


def write_config(config: Mapping[str, Any], family: str, directory: Path) -> None:
    """Write a draft's config.json, which says its family."""
    kept = {**config, "redraft": {**config.get("redraft", {}), "family": family}}
    (directory / "config.json").write_text(json.dumps(kept, indent=2, sort_keys=True) + "\n")


def check_config(config: dict[str, Any], directory: Path, like: dict[str, Any] | None, target: TargetCard) -> None:
    """Raise ValueError if a draft is not the target's, or can't be swapped in for the one of config `like`."""
    check_made_for(config, directory, target)
    if config.get("vocab_size") != target.vocab_size:
        raise ValueError(
            f"draft {directory.name} has vocab_size {config.get('vocab_size')}, the target has {target.vocab_size}"
        )
    if like is not None:
        keys = (config.keys() | like.keys()) - {"redraft"}
        if changed := sorted(key for key in keys if config.get(key) != like.get(key)):
            raise ValueError(
                f"draft {directory.name} differs from the served draft in {', '.join(changed)}; a swap can't change it"
            )


def check_made_for(config: dict[str, Any], directory: Path, target: TargetCard) -> None:
    """Raise ValueError if a draft says that it was made for another target; one from elsewhere says nothing."""
    made_for = own(config, directory)
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


def require_llama_layout(model_type: str, family: str) -> None:
    """Raise ValueError if a family can't read a target's layers and norms."""
    if model_type not in MODEL_TYPES:
        raise ValueError(f"{family} reads targets of Llama's layout, {', '.join(MODEL_TYPES)}; got {model_type!r}")


def require_vocabulary(name: str, token_ids: Tensor, vocab_size: int) -> None:
    """Raise ValueError unless what tensor `name` lets a draft say, [D] target ids, ascends within 0 to V − 1."""
    if int(token_ids[0]) < 0 or int(token_ids[-1]) >= vocab_size or not bool((token_ids.diff() > 0).all()):
        raise ValueError(
            f"{name} must name ascending tokens of 0 to {vocab_size - 1}; "
            f"got {int(token_ids.min())} to {int(token_ids.max())}"
        )


def require_whole_vocabulary(family: str, size: int, vocab_size: int) -> None:
    """Raise ValueError unless a draft's `size` tokens are all of the target's, as in vLLM's drafts of such a family."""
    if size != vocab_size:
        raise ValueError(
            f"vLLM's drafts of family {family} say every token of the target's {vocab_size or 'vocabulary'}, this one "
            f'{size}: set vocab_size = 0 in [draft], or engine "torch"'
        )


def require_vocab_size(size: int, vocab_size: int) -> None:
    """Raise ValueError if a new draft is to say more tokens than the target's `vocab_size`, or none."""
    if not 1 <= size <= vocab_size:
        raise ValueError(f"draft vocab_size must be 1 to {vocab_size}, the target's; got {size}")


def read_params(config: Mapping[str, Any], family: str, params: type[BaseParams], directory: Path) -> Any:
    """Return the settings that a draft's config keeps under its family's name; ValueError if there are none such."""
    table = config.get(family)
    if not isinstance(table, dict):
        raise ValueError(f'draft {directory.name}: config.json has "{family}" {table!r}; wanted its settings')
    return validate(params, table, f"draft {directory.name}")


def made_for(target: TargetCard) -> dict[str, str]:
    """Return what a draft's config keeps of its target under "redraft"."""
    return {"target_sha256": target.sha256, "tokenizer_sha256": target.tokenizer_sha256}


def fused(names: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    """Stack tensors as vLLM's layers of the Llama kind do; return each parameter's name with its tensors in order.

    `names` are those that parameters would have in vLLM if nothing were stacked, with the checkpoint's tensor.
    """
    whole_of = {part: whole for whole, parts in FUSED.items() for part in parts}
    parameters = {}
    for name, tensor in names.items():
        place, _, leaf = name.rpartition(".")
        layer, _, linear = place.rpartition(".")
        if whole := whole_of.get(linear):
            stacked = (names.get(f"{layer}.{part}.{leaf}") for part in FUSED[whole])
            parameters[f"{layer}.{whole}.{leaf}"] = tuple(part for part in stacked if part is not None)
        else:
            parameters[name] = (tensor,)
    return parameters
