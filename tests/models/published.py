"""Heads of ours, rewritten in the layouts that others publish theirs in."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from models.core.checkpoints.loading import read_tensor
from models.drafts.eagle3.layouts import TAPS

Change = Callable[[dict[str, Any], dict[str, Tensor]], object]


def published(
    draft: Path, target: Path, directory: Path, layout: str, change: Change = lambda config, tensors: None
) -> Path:
    """Write the head of `draft` into a new directory, after a change to its config and tensors in the layout."""
    config = json.loads((draft / "config.json").read_text())
    tensors = load_file(draft / "model.safetensors")
    if layout == "native":
        config, tensors = in_native_layout(config, tensors)
    else:
        config, tensors = in_speculators_layout(config, tensors, read_tensor(target, "model.embed_tokens.weight"))
    change(config, tensors)
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    save_file(tensors, directory / "model.safetensors")
    return directory


def in_native_layout(config: dict[str, Any], tensors: dict[str, Tensor]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Rewrite a head of ours as the original repositories publish theirs."""
    published = {key: value for key, value in config.items() if key not in ("redraft", "rope_parameters")}
    published |= {"rope_theta": config["rope_parameters"]["rope_theta"], "rope_scaling": None, "torch_dtype": "float16"}
    mask = torch.zeros(config["vocab_size"], dtype=torch.bool)
    mask[tensors["d2t"] + torch.arange(len(tensors["d2t"]))] = True
    return published, {**tensors, "t2d": mask}


def in_speculators_layout(
    config: dict[str, Any], tensors: dict[str, Tensor], embedding: Tensor
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Rewrite a head of ours as the speculators library saves its own."""
    own = ("draft_vocab_size", TAPS)
    native, with_mask = in_native_layout(config, tensors)
    layer = {key: value for key, value in native.items() if key not in (*own, "architectures")}
    published = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_config": {
            "algorithm": "eagle3",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {"name_or_path": "random-llama-0", "architectures": ["LlamaForCausalLM"]},
        },
        "norm_before_residual": config.get("norm_before_residual", False),
        "target_hidden_size": None,
        "transformer_layer_config": layer,
        **{key: native[key] for key in own},
    }
    renamed = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in with_mask.items()}
    return published, {**renamed, "embed_tokens.weight": embedding}


def like_eagle31(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Give a head the norms of EAGLE-3.1, whose gains make a difference."""
    config.update(norm_before_fc=True, fc_norm=True, norm_output=True)
    width, wide = tensors["fc.weight"].shape
    tensors["input_norm.weight"] = _around(1.0, wide)
    tensors |= {f"fc_norm.{number}.weight": _around(1.0, width) for number in range(wide // width)}


def like_qwen3(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Give a head a layer of Qwen3's kind, with biases."""
    layer = config.get("transformer_layer_config", config)
    layer.update(model_type="qwen3", attention_bias=True)
    if layer is config:
        config["architectures"] = ["Eagle3Qwen3ForCausalLM"]
    [place] = {name.removesuffix("q_proj.weight") for name in tensors if name.endswith("q_proj.weight")}
    tensors |= {f"{place}{name}_norm.weight": _around(1.0, layer["head_dim"]) for name in "qk"}
    tensors |= {f"{place}{name}_proj.bias": _around(0.0, len(tensors[f"{place}{name}_proj.weight"])) for name in "qkv"}


def _around(mean: float, size: int) -> Tensor:
    return (mean + 0.3 * torch.randn(size, generator=torch.Generator().manual_seed(size))).bfloat16()
