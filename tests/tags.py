"""The tags of a draft of which a test says nothing more."""

from typing import TYPE_CHECKING

from infra.versions import Lineage, Target

if TYPE_CHECKING:
    from models.targets import TargetCard

TARGET = Target(name="made-up", sha256="a", tokenizer_sha256="b", vocab_size=64, chat_template_sha256="c")


def draft_tags(**changed: str) -> dict[str, str]:
    """Return all tags of a draft that was trained from nothing and never judged; `changed` ones as they are given."""
    nothing = dict.fromkeys(("parent", "window", "sampling", "gate"))
    lineage = Lineage(target=TARGET, target_version=1, quantization="", git_commit="", flow_run="", **nothing)
    return lineage.to_tags() | changed


def tags_for(card: "TargetCard", **changed: str) -> dict[str, str]:
    """Return those of a draft for a target that exists, which promises what every draft holds."""
    told = {"target_sha256": card.sha256, "tokenizer_sha256": card.tokenizer_sha256, "golden_tau": "1.0"}
    return draft_tags(**told, vocab_size=str(card.vocab_size)) | changed
