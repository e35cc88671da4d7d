"""Any causal language model: a local Hugging Face directory, or a hub id where a hub can be reached."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, Self

import torch
from pydantic import Field, model_validator
from safetensors import SafetensorError
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from models.core.checkpoints.loading import load_reported
from models.params import BaseParams, require_unsaid
from models.targets import TOKENIZER_FILES

PAPER = "none: whatever the directory holds"


class Params(BaseParams):
    """Which model."""

    name: Literal["pretrained"] = "pretrained"
    path: str = Field(
        description='a local directory, or a hub id such as "Qwen/Qwen3-8B", which needs REDRAFT_HUB=true.'
    )
    revision: str = Field("main", description="a branch, tag or commit of the hub's repository.")
    dtype: Literal["auto", "float32", "bfloat16"] = Field("auto", description='"auto" keeps the format of the files.')

    @model_validator(mode="after")
    def _has_revisions(self) -> Self:
        if Path(self.path).exists():
            require_unsaid(self, ["revision"], self.name, f"{self.path} is a local directory")
        return self


def build(params: Params, directory: Path) -> None:
    """Write the target into `directory`; remote code is never run. ValueError if there is no such model, no hub to ask,
    or the directory is not one of a causal language model; names what is missing."""
    local = Path(params.path)
    if local.exists() or params.path.startswith(("/", ".", "~")):
        _require_model(local)
    dtype = "auto" if params.dtype == "auto" else getattr(torch, params.dtype)
    with _told_apart(params):
        model, missing = load_reported(params.path, revision=params.revision, dtype=dtype, use_safetensors=True)
    if missing:
        raise ValueError(f"target {params.path!r} has no tensor {missing[0]} ({len(missing)} are missing)")
    model.save_pretrained(directory)
    tokenizer(params).save_pretrained(directory)


def tokenizer(params: Params) -> PreTrainedTokenizerBase:
    """Return the target's tokenizer; ValueError as `build`."""
    with _told_apart(params):
        return AutoTokenizer.from_pretrained(params.path, revision=params.revision)


@contextmanager
def _told_apart(params: Params) -> Iterator[None]:
    """Say whether a directory is at fault or a hub that can't be reached."""
    try:
        yield
    except (OSError, ValueError, SafetensorError) as error:
        wrong = (
            "can't be loaded" if Path(params.path).exists() else "is neither a local directory nor on a hub in reach"
        )
        raise ValueError(f"target {params.path!r} {wrong}: {str(error).strip().splitlines()[0]}") from error


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
