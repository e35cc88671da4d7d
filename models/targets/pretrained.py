"""Any causal language model: a local Hugging Face directory, or a hub id where a hub can be reached."""

from pathlib import Path
from typing import Literal

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer

from models.params import BaseParams
from models.targets import TOKENIZER_FILES

PAPER = "none: whatever the directory holds"


class Params(BaseParams):
    """`path` is a local directory or a hub id; `revision` a commit of the hub's repository."""

    name: Literal["pretrained"] = "pretrained"
    path: str
    revision: str = "main"
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"


def build(params: Params, directory: Path) -> None:
    """Write the target into `directory`; remote code is never run.

    Raises:
        ValueError: there is no such model, no hub to ask, or the directory is not one of a causal language model; names
            what is missing.
    """
    local = Path(params.path)
    if local.exists() or params.path.startswith(("/", ".", "~")):
        _require_model(local)
    dtype = "auto" if params.dtype == "auto" else getattr(torch, params.dtype)
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            params.path, revision=params.revision, dtype=dtype, use_safetensors=True, output_loading_info=True
        )
        tokenizer = AutoTokenizer.from_pretrained(params.path, revision=params.revision)
    except (OSError, ValueError, SafetensorError) as error:
        wrong = "can't be loaded" if local.exists() else "is neither a local directory nor on a hub in reach"
        raise ValueError(f"target {params.path!r} {wrong}: {str(error).strip().splitlines()[0]}") from error
    if missing := sorted(report["missing_keys"]):  # the library would have drawn them at random
        raise ValueError(f"target {params.path!r} has no tensor {missing[0]} ({len(missing)} are missing)")
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def _require_model(directory: Path) -> None:
    if not directory.is_dir():
        raise ValueError(f"target '{directory}' is not a directory")
    for what, patterns in (
        ("config.json", ("config.json",)),
        ("safetensors weights", ("*.safetensors",)),
        (f"tokenizer ({', '.join(TOKENIZER_FILES)})", TOKENIZER_FILES),
    ):
        if not any(file for pattern in patterns for file in directory.glob(pattern)):
            raise ValueError(f"target '{directory}' is not a Hugging Face model directory: it has no {what}")
