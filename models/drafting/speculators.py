"""A draft's directory in the layout of `speculators`, which vLLM serves together with the target that it names.

https://docs.vllm.ai/projects/speculators; `models.drafts.eagle3.layouts` reads it back.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from models.drafting.draft_families import family_of, name_of
from models.drafting.draft_files import read_json
from models.drafting.eagle3_heads import WEIGHTS
from models.drafts.eagle3.layouts import LAYER_NAMES, TAPS

FAMILIES = ("eagle3",)
# What the layout keeps outside of the layer's settings, or not at all.
APART = ("architectures", "draft_vocab_size", "norm_before_residual", "redraft", TAPS)


def publish(directory: Path, into: Path, target: Mapping[str, Any], num_draft_tokens: int) -> None:
    """Write a draft so that `vllm serve INTO` serves it with its target.

    Args:
        directory: of the draft, as it is saved here.
        into: an empty directory.
        target: `name_or_path`, a directory or a hub's id, and `architectures`.
        num_draft_tokens: K, that vLLM drafts in each step unless it is told another.

    Raises:
        ValueError: vLLM reads no draft of this family from such a layout.
    """
    if (name := name_of(family_of(directory))) not in FAMILIES:
        raise ValueError(f"the draft is of family {name}; wanted one that vLLM serves without redraft, {FAMILIES[0]}")
    config, tensors = read_json(directory / "config.json"), load_file(directory / WEIGHTS)
    published = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": name,
        "speculators_config": {
            "algorithm": name,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": num_draft_tokens}],
            "verifier": dict(target),
        },
        "transformer_layer_config": {key: value for key, value in config.items() if key not in APART},
        "draft_vocab_size": config["draft_vocab_size"],
        "target_hidden_size": config["hidden_size"],
        "norm_before_residual": bool(config.get("norm_before_residual", False)),
        TAPS: config[TAPS],
        "dtype": config.get("dtype", "bfloat16"),
        "redraft": config["redraft"],
    }
    native, own = LAYER_NAMES
    renamed = {
        own + key.removeprefix(native) if key.startswith(native) else key: tensor for key, tensor in tensors.items()
    }
    if (offsets := tensors.get("d2t")) is not None:
        renamed["t2d"] = torch.zeros(config["vocab_size"], dtype=torch.bool)
        renamed["t2d"][offsets + torch.arange(len(offsets))] = True
    save_file(renamed, into / WEIGHTS, metadata={"format": "pt"})
    (into / "config.json").write_text(json.dumps(published, indent=2, sort_keys=True) + "\n")
