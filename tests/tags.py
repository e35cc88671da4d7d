"""The tags of a draft of which a test says nothing more."""

from infra.versions import Lineage, Target

TARGET = Target(name="made-up", sha256="a", tokenizer_sha256="b", vocab_size=64, chat_template_sha256="c")


def draft_tags(**changed: str) -> dict[str, str]:
    """Return all tags of a draft that was trained from nothing and never judged; `changed` ones as they are given."""
    lineage = Lineage(
        target=TARGET,
        target_version=1,
        parent=None,
        window=None,
        sampling=None,
        quantization="",
        git_commit="",
        flow_run="",
        gate=None,
    )
    return lineage.to_tags() | changed
