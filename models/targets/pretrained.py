"""Any causal language model: a local Hugging Face directory, or a hub id where a hub can be reached."""

from pathlib import Path
from typing import Literal

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from models.params import BaseParams

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
        ValueError: there is no such model, or no hub to ask.
    """
    dtype = "auto" if params.dtype == "auto" else getattr(torch, params.dtype)
    try:
        model = AutoModelForCausalLM.from_pretrained(params.path, revision=params.revision, dtype=dtype)
        tokenizer = AutoTokenizer.from_pretrained(params.path, revision=params.revision)
    except OSError as error:
        raise ValueError(
            f"target {params.path!r} is neither a local directory nor on a hub in reach: {error}"
        ) from error
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
