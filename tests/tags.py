"""Drafts and targets of which a test says nothing more: their tags, and versions that hold a file and no model."""

from pathlib import Path
from typing import TYPE_CHECKING

from infra.artifacts import staged
from infra.registry import Registry
from infra.versions import Lineage, Target, Version
from models.types import Kind

if TYPE_CHECKING:
    from models.targets import TargetCard

TARGET = Target(name="made-up", sha256="a", tokenizer_sha256="b", vocab_size=64, chat_template_sha256="c")
UNKNOWN = dict.fromkeys(("parent", "window", "sampling", "gate"))


def draft_tags(**changed: str) -> dict[str, str]:
    """Return all tags of a draft that was trained from nothing and never judged; `changed` ones as they are given."""
    lineage = Lineage(target=TARGET, target_version=1, quantization="", git_commit="", flow_run="", **UNKNOWN)
    return lineage.to_tags() | changed


def tags_for(card: "TargetCard", **changed: str) -> dict[str, str]:
    """Return those of a draft for a target that exists, which promises what every draft holds."""
    told = {"target_sha256": card.sha256, "tokenizer_sha256": card.tokenizer_sha256, "golden_tau": "1.0"}
    return draft_tags(**told, vocab_size=str(card.vocab_size)) | changed


def register(registry: Registry, kind: Kind, folder: Path, **tags: str) -> Version:
    """Register a version with a file of its own below a folder, and such tags."""
    made = folder / f"{kind} {len(registry.versions(kind)) + 1}"
    with staged(made) as directory:
        (directory / "model.safetensors").write_text(f"{made}")
    return registry.register(kind, made, draft_tags(**tags))
