"""A head's directory in the layout of `speculators`, which vLLM serves together with the target that it names.

https://docs.vllm.ai/projects/speculators; `layouts` reads it back.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from models.core.drafting.draft_files import read_json
from models.core.drafting.draft_format import WEIGHTS
from models.drafts.eagle3.layouts import LAYER_NAMES, TAPS

# What the layout keeps outside of the layer's settings, or not at all.
APART = ("architectures", "draft_vocab_size", "norm_before_residual", "redraft", TAPS)


def publish(directory: Path, into: Path, target: Mapping[str, Any], num_draft_tokens: int) -> None:
    """See `models.drafts.Publisher`."""
    config, tensors = read_json(directory / "config.json"), load_file(directory / WEIGHTS)
    published = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_config": {
            "algorithm": "eagle3",
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
