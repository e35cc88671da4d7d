"""Model directories: read as tensors, as models, and written.

Quantized weights, and factors of those of low rank, are read as the floats that they stand for. Such a layer's weight
[O, I] lies in the file as `left` [O, r] and `right` [r, I], W = left · right: fewer bytes in a file, and fewer products
where the rank r is low. The reference engine multiplies by one after the other (`stacked`); vLLM and transformers know
whole matrices alone.
"""

import json
import shutil
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from models.core.checkpoints import compressed
from models.core.layers import quantized_weights
from models.core.layers.kernels import Product, product
from models.targets import target_config

LEFT, RIGHT = "left", "right"
# What is not copied from one target to another that is made of it: the weights, what describes them, what lists files.
_FILE = "model.safetensors"
_OWN = ("config.json", "manifest.json", "golden.json", "model.safetensors.index.json", quantized_weights.FILE)


def read_tensor(directory: Path, name: str) -> Tensor:
    """Read one tensor of a model directory, single-file or sharded; ValueError if no file holds it."""
    layer = name.rpartition(".")[0]
    found: dict[str, Tensor] = {}
    for file in sorted(directory.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for key in tensors.keys():  # noqa: SIM118 - a safetensors handle is no mapping
                if key.rpartition(".")[0] == layer:
                    found[key] = tensors.get_tensor(key)
    found = join_factors(_restored(found, directory))
    if name not in found:
        raise ValueError(f"no tensor {name} in {directory}")
    return found[name]


def read_tensors(directory: Path) -> dict[str, Tensor]:
    """Read all tensors of a model directory; ValueError if there are none, or one can't be read or restored."""
    return join_factors(read_parts(directory))


def read_parts(directory: Path) -> dict[str, Tensor]:
    """Read all tensors of a model directory, those of low rank as they are stored; ValueError as `read_tensors`."""
    return _restored(read_stored(directory), directory)


def _restored(tensors: dict[str, Tensor], directory: Path) -> dict[str, Tensor]:
    scheme = quantization(directory)
    return compressed.restore(tensors, scheme) if scheme else tensors


def quantization(directory: Path) -> dict[str, Any] | None:
    """Return how config.json says that weights are quantized, or None for plain ones."""
    file = directory / "config.json"
    found: dict[str, Any] | None = json.loads(file.read_text()).get("quantization_config") if file.is_file() else None
    return found


def read_stored(directory: Path) -> dict[str, Tensor]:
    """Read all tensors of a model directory as they are stored; ValueError as `read_tensors`."""
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise ValueError(f"model.safetensors of {directory.name} can't be read: there is no safetensors file")
    tensors: dict[str, Tensor] = {}
    for file in files:
        try:
            tensors |= load_file(file)
        except OSError as error:
            raise ValueError(f"{file.name} of {directory.name} can't be read: {error}") from error
        except (ValueError, SafetensorError) as error:
            raise ValueError(f"{file.name} of {directory.name} is not a safetensors file: {error}") from error
    return tensors


def tensor_names(file: Path) -> list[str]:
    """Return the names of a safetensors file's tensors; ValueError if it can't be read."""
    try:
        with safe_open(file, framework="pt") as tensors:
            return list(tensors.keys())
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{file.name} of {file.parent.name} is not a safetensors file: {error}") from error


def choose_vocabulary(token_counts: np.ndarray, size: int) -> Tensor:
    """Return the `size` most frequent target ids, ascending; ties go to the smaller id, the more common token."""
    return torch.from_numpy(np.sort(np.argsort(-np.asarray(token_counts), kind="stable")[:size]).astype(np.int64))


def split_factors(tensors: Mapping[str, Tensor], ranks: Mapping[str, int]) -> dict[str, Tensor]:
    """Put factors in place of the weights of layers, exact for a weight of the rank that `ranks` gives its layer."""
    parts = {name: tensor for name, tensor in tensors.items() if name.removesuffix(".weight") not in ranks}
    for layer, rank in ranks.items():
        weight = tensors[f"{layer}.weight"]
        left, values, right = torch.linalg.svd(weight.float(), full_matrices=False)
        root = values[:rank].sqrt()  # half of each, so that neither loses more in rounding
        parts[f"{layer}.{LEFT}"] = (left[:, :rank] * root).to(weight.dtype)
        parts[f"{layer}.{RIGHT}"] = (root[:, None] * right[:rank]).to(weight.dtype)
    return parts


def join_factors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Multiply factors out to float32 weights; what is none stays as it is."""
    plain = {}
    for name, tensor in tensors.items():
        layer, _, part = name.rpartition(".")
        if part == LEFT:
            plain[f"{layer}.weight"] = tensor.float() @ tensors[f"{layer}.{RIGHT}"].float()
        elif part != RIGHT:
            plain[name] = tensor
    return plain


def stacked(left: Sequence[Tensor], right: Sequence[Tensor]) -> Product:
    """Return the product with the matrices of layers, one below the other, that read the same input."""
    inner, outer, ranks = product(torch.cat(list(right))), [product(one) for one in left], list(map(len, right))

    def multiply(x: Tensor, bias: Tensor | None = None) -> Tensor:
        parts = inner(x).split(ranks, -1)
        output = torch.cat([one(part.contiguous()) for one, part in zip(outer, parts, strict=True)], -1)
        return output if bias is None else output + bias

    return multiply


def load_model(directory: Path, dtype: torch.dtype = torch.float32, device: str = "cpu") -> PreTrainedModel:
    """Load a target to compute with, rounded inputs included; ValueError if a tensor is missing or can't be read."""
    if _is_plain(directory):
        return moved(_load_plain(directory, dtype), device)
    model = moved(load_floats(directory), dtype)
    compressed.round_inputs(model, read_stored(directory))
    return moved(model, device)


def load_floats(directory: Path) -> PreTrainedModel:
    """Load a target in float32, to be changed or trained, quantized weights and factors as floats; see `load_model`."""
    if _is_plain(directory):
        return _load_plain(directory, torch.float32)
    config = target_config(directory)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    _require_all(set(model.load_state_dict(read_tensors(directory), strict=False).missing_keys) - tied, directory)
    model.eval()
    return model


def _is_plain(directory: Path) -> bool:
    config = json.loads((directory / "config.json").read_text())
    return "quantization_config" not in config and not config.get("redraft", {}).get("factors")


def _load_plain(directory: Path, dtype: torch.dtype) -> PreTrainedModel:
    model, missing = load_reported(pretrained_model_name_or_path=directory, dtype=dtype)
    _require_all(missing, directory)
    model.eval()
    return model


def load_reported(kind: Any = AutoModelForCausalLM, **settings: Any) -> tuple[PreTrainedModel, list[str]]:
    """Return a model, of a kind of transformers' automatic classes, and which of its tensors the files lack: the
    library draws those at random. `settings` are those of `from_pretrained`."""
    loaded: Any = kind.from_pretrained(output_loading_info=True, **settings)
    model, report = loaded  # which is annotated as the model alone
    return model, sorted(report["missing_keys"])


def write_random(config: LlamaConfig, tokenizer: PreTrainedTokenizerBase, seed: int, directory: Path) -> None:
    """Write a Llama model of random weights in bfloat16, and its tokenizer."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    moved(model, torch.bfloat16).save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def moved(model: PreTrainedModel, to: torch.dtype | torch.device | str) -> PreTrainedModel:
    """Return the model itself in another number format, or on another device."""
    same: PreTrainedModel = model.to(to)  # type: ignore[arg-type]  # transformers' wrapper asks for the model again
    return same


def _require_all(missing: Collection[str], directory: Path) -> None:
    if missing:
        raise ValueError(f"{directory} has no tensor {min(missing)} ({len(missing)} are missing)")


def save_model(model: PreTrainedModel, directory: Path, like: Path) -> None:
    """Write a model made of the target `like`, in its format and with all else of it, factors included."""
    config = json.loads((like / "config.json").read_text())
    dtype = getattr(torch, str(config.get("dtype") or config.get("torch_dtype") or "float32"))
    noted = getattr(model.config, "redraft", {})
    if noted.get("factors"):
        parts = split_factors(dict(model.named_parameters()), noted["ranks"])
        save_file({name: part.detach().to(dtype).contiguous().cpu() for name, part in parts.items()}, directory / _FILE)
        model.config.dtype = dtype
        model.config.save_pretrained(directory)
    else:
        moved(model, dtype).save_pretrained(directory)
    complete(directory, like)


def complete(directory: Path, like: Path) -> None:
    """Copy tokenizer, chat template and generation settings of `like` beside new weights."""
    for file in like.iterdir():
        if file.is_file() and file.suffix != ".safetensors" and file.name not in _OWN:
            shutil.copy(file, directory)
    config = json.loads((directory / "config.json").read_text())
    config.pop("_name_or_path", None)  # a path of this machine
    (directory / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
