"""Drafts of any family for the two-layer target, with a vocabulary of 64 tokens where the family has one of its own."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from infra.artifacts import write_manifest
from models.core.drafting.draft_families import name_of
from models.drafts import Draft, Family, Rows
from models.params import BaseParams
from models.targets import describe
from tests.conftest import shake

# What else is set of a family: for the two-layer target, to be served by three tokens a step, to be refused by vLLM.
TINY: dict[str, dict[str, object]] = {
    "dream": {"image_tokens": (9, 15)},
    "hydra": {"num_heads": 4},
    "lm": {"num_layers": 1},
    "medusa": {"num_heads": 4},
    "prompt_tokens": {"num_prompts": 4, "ensemble": 2},
    "rag_draft": {"context": 7, "part": 2, "question": 2},  # less than every prompt of `prompts`
}
SERVED = {"dflash": {"block_size": 4}, "eagle": {"vocab_size": 0}, "medusa": {"vocab_size": 0, "num_heads": 3}}
REFUSED = {"lm": {"num_layers": 3, "nested": (1, 2)}}


def params_of(family: Family, served: bool = False, refused: bool = False) -> BaseParams:
    """Return the Params of a tiny draft, also of one that vLLM is to serve or, where it can, to refuse."""
    name = name_of(family)
    shape = {"vocab_size": 64} if "vocab_size" in family.Params.model_fields else {}
    shape |= TINY.get(name, {}) | (SERVED.get(name, {}) if served else {}) | (REFUSED.get(name, {}) if refused else {})
    return family.Params(name=name, **shape)


def make_tiny(family: Family, target: Path, seed: int = 0, scale: float = 0.02, served: bool = False) -> Draft:
    """Make a draft of such Params, with seeded noise on its weights."""
    counts = np.zeros(259)
    counts[3:67] = 1
    draft = family.create(params_of(family, served), target, counts)
    if hasattr(family, "collect"):
        family.collect(draft, [list(range(3, 60))])
    shake(draft, scale, seed)
    return draft


def change_config(saved: Path, directory: Path, **changes: object) -> None:
    """Copy a draft without its manifest, with another config.json."""
    shutil.copytree(saved, directory, dirs_exist_ok=True, ignore=shutil.ignore_patterns("manifest.json"))
    config = json.loads((saved / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | changes))


def rows_at(*index: int, width: int = 128, length: int = 9, **more: object) -> Rows:
    """Return rows of one text of `length` seeded states, and of tokens that go on behind them."""
    rng = torch.Generator().manual_seed(0)
    hidden, tokens = torch.randn(1, length, width, generator=rng), torch.randint(0, 259, (1, length + 8), generator=rng)
    return Rows(hidden, tokens, torch.zeros(len(index), dtype=torch.int64), torch.tensor(index), **more)


def library_layer(draft: Draft, read: Tensor, number: int = 0, normed: bool = True, together: int = 1) -> Tensor:
    """Run the library's layer with the weights of a draft's on [n, H], causally.

    Args:
        draft: whose layer.
        read: what it reads.
        number: of the layer.
        normed: whether it has a norm before its attention.
        together: rows at the end that see each other.
    """
    config = LlamaConfig(**draft.config, attn_implementation="eager")
    layer = LlamaDecoderLayer(config, 0)
    if not normed:
        layer.input_layernorm = torch.nn.Identity()
    layer.load_state_dict(draft.layers[number].state_dict())
    positions = torch.arange(len(read))[None]
    waves = LlamaRotaryEmbedding(config)(read, positions)
    mask = torch.full((len(read), len(read)), float("-inf")).triu(1)
    mask[-together:] = 0.0
    return layer(read[None], attention_mask=mask[None, None], position_ids=positions, position_embeddings=waves)[0]


def save_tiny(
    family: Family, target: Path, directory: Path, seed: int = 0, scale: float = 0.02, served: bool = False
) -> Path:
    """Save such a draft with its manifest in a directory, which is made, and return that."""
    directory.mkdir(exist_ok=True)
    family.save(make_tiny(family, target, seed, scale, served), directory)
    write_manifest(directory)
    return directory


def require_refused(family: Family, target: Path, directory: Path, message: str, **changes: object) -> None:
    """Fail unless such a draft with another config.json is refused with a message; it is called "changed"."""
    change_config(save_tiny(family, target, directory), directory / "changed", **changes)
    with pytest.raises(ValueError, match=message):
        family.check(directory / "changed", None, describe(target))
