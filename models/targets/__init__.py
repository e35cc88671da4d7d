"""Where a target comes from, and what makes two targets the same.

Each file's `build(params, directory)` writes a plain Hugging Face directory: config, safetensors, tokenizer and chat
template; `config(params)` and `tokenizer(params)` return configuration and tokenizer alone, without weights. A draft
fits a target only if the weights and the tokenizer hash to what it was trained with, so both hashes are taken from the
files.
"""

import hashlib
import json
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer

from models.types import MANIFEST_NAME, Frozen

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

# Those whose forward pass `models.core.layers.decoder` knows.
MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
# Of a model without a chat template: each message's text in a line of its own, for the model to go on.
PLAIN_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{{ '\n' if not loop.last }}{% endfor %}"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt")


class TargetCard(Frozen):
    """What identifies a target; the hashes are sha256 in hexadecimal."""

    name: str
    sha256: str
    tokenizer_sha256: str
    vocab_size: int
    chat_template_sha256: str
    hidden_size: int
    num_layers: int


def describe(directory: Path) -> TargetCard:
    """Read a target's card off its directory; ValueError if a file that every target has is missing.

    A file older than the directory's manifest has the sha256 that stands there: whoever opened the directory compared
    them, and weights of many GB are not read again.
    """
    config_file = directory / "config.json"
    if not config_file.is_file():
        raise ValueError(f"{directory} is not a Hugging Face model directory: config.json is missing")
    told, config = json.loads(config_file.read_text()), target_config(directory)
    return TargetCard(
        name=str(told.get("_name_or_path") or told.get("_model_name_or_path") or told["model_type"]),
        sha256=_digest(sorted(directory.glob("*.safetensors")), f"safetensors weights in {directory}"),
        tokenizer_sha256=_digest(
            [directory / name for name in TOKENIZER_FILES if (directory / name).is_file()], f"tokenizer in {directory}"
        ),
        vocab_size=config.vocab_size,
        chat_template_sha256=hashlib.sha256(_chat_template(directory).encode()).hexdigest(),
        hidden_size=config.hidden_size,
        num_layers=config.num_hidden_layers,
    )


def target_config(directory: Path) -> "PreTrainedConfig":
    """Return a target's configuration; sizes have the same names in all families."""
    from transformers import AutoConfig  # takes seconds, and recipes are parsed without it

    found: PreTrainedConfig = AutoConfig.from_pretrained(directory)
    return found


def stop_ids(directory: Path) -> frozenset[int]:
    """Return the token ids that end an answer, from the target's generation settings, else from its configuration."""
    from transformers import GenerationConfig

    has_settings = (directory / "generation_config.json").is_file()
    ids = (GenerationConfig.from_pretrained(directory) if has_settings else target_config(directory)).eos_token_id
    return frozenset([ids] if isinstance(ids, int) else ids or ())


def differing_tokens(directory: Path, like: Path) -> list[str]:
    """Return the tokens without one id in both model directories, sorted; ValueError if one has no tokenizer.json."""
    for one in (directory, like):
        if not (one / "tokenizer.json").is_file():
            raise ValueError(f"{one.name} has no tokenizer.json, so its vocabulary can't be compared")
    own, wanted = (Tokenizer.from_file(str(one / "tokenizer.json")).get_vocab() for one in (directory, like))
    return sorted(token for token in own.keys() | wanted.keys() if own.get(token) != wanted.get(token))


def num_ids(directory: Path) -> int:
    """Return the least vocabulary size that has all of a tokenizer.json's ids; one may be padded to more."""
    return 1 + max(Tokenizer.from_file(str(directory / "tokenizer.json")).get_vocab().values())


def _digest(files: list[Path], what: str) -> str:
    if not files:
        raise ValueError(f"no {what}")
    digest, (listed, listed_ns) = hashlib.sha256(), _listed(files[0].parent)
    for file in files:
        stat, entry = file.stat(), listed.get(file.name)
        if entry is not None and entry["bytes"] == stat.st_size and stat.st_mtime_ns < listed_ns:
            digest.update(bytes.fromhex(entry["sha256"]))
        else:
            digest.update(_file_digest(file, (stat.st_ino, stat.st_size, stat.st_mtime_ns)))
    return digest.hexdigest()


def _listed(directory: Path) -> tuple[dict[str, dict[str, Any]], int]:
    """Return name to entry of a directory's manifest, and when it was written; nothing without one."""
    manifest = directory / MANIFEST_NAME
    if not manifest.is_file():
        return {}, 0
    return json.loads(manifest.read_text()).get("files", {}), manifest.stat().st_mtime_ns


@lru_cache(maxsize=64)
def _file_digest(file: Path, stamp: tuple[int, int, int]) -> bytes:
    """Return the sha256 of a file as it is under a stamp: weights are hashed once a process, not at every look."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").digest()


def _chat_template(directory: Path) -> str:
    template = directory / "chat_template.jinja"
    if template.is_file():
        return template.read_text()
    settings = directory / "tokenizer_config.json"
    return str(json.loads(settings.read_text()).get("chat_template", "")) if settings.is_file() else ""
