"""Write a registered draft so that vLLM serves it without redraft, with a model card that says where it came from.

The champion is also published into a folder that others roll out from: a directory, and a file that names it.
"""

import json
from pathlib import Path
from typing import cast

from infra.files import renamed_when_complete, replacing
from infra.registry import Registry, open_registry
from infra.settings import load_settings
from infra.versions import Version, ancestors
from models.core.drafting.draft_families import family_of, name_of
from models.drafts import Publisher
from models.types import Frozen
from tasks.stages import task

CARD = "README.md"
POINTER = "champion.json"


class Published(Frozen):
    """What `champion.json` says: the draft's number, the sha256 of its files, and its directory, never changed."""

    version: int
    digest: str
    directory: str


@task
def export_draft(number: int, directory: Path, target: str = "", licence: str = "") -> str:
    """Write draft `number` into a new directory, whole or not at all, and return the name of its target in there.

    vLLM is to load the target from `target`, a directory or a hub's id, by default the registry's copy. The licence is
    named as Hugging Face does.

    Raises:
        ValueError: there is no such draft, its target is not in the registry, vLLM serves no drafts of its family by
            themselves, or the directory exists.
    """
    if directory.exists():
        raise ValueError(f"{directory} exists; wanted a directory that is to be made")
    registry, cache = open_registry(), load_settings().cache
    version = registry.get("draft", number)
    lineage = version.lineage
    files = registry.download(version, cache)
    family = family_of(files)
    if not hasattr(family, "publish"):
        raise ValueError(f"draft {number} is of family {name_of(family)}, whose drafts vLLM serves only with redraft")
    publisher = cast("Publisher", family)
    if lineage.target_version is None:
        raise ValueError(f"draft {number} names no target of this registry")
    target_files = registry.download(registry.get("target", lineage.target_version), cache)
    target = target or str(target_files)
    architectures = json.loads((target_files / "config.json").read_text())["architectures"]
    verifier = {"name_or_path": target, "architectures": architectures}
    with renamed_when_complete(directory) as staging:
        publisher.publish(files, staging, verifier, lineage.num_draft_tokens or 3)
        (staging / CARD).write_text(card(registry, version, name_of(publisher), target, licence))
    return target


@task
def publish_champion(folder: Path, target: str = "", licence: str = "") -> Published | None:
    """Write the champion's directory as `export_draft` does, unless it is there, and then name it in `champion.json`.

    Both are renamed into place, so that whoever copies the file first and then the directory gets the draft whole.
    Returns what the file says now; None without a champion, which leaves the file as it is.
    """
    if (champion := open_registry().champion("draft")) is None:
        return None
    published = Published(version=champion.number, digest=champion.sha256, directory=champion.sha256)
    if not (folder / published.directory).exists():
        export_draft.fn(champion.number, folder / published.directory, target, licence)
    pointer, content = folder / POINTER, published.model_dump_json() + "\n"
    if not pointer.exists() or pointer.read_text() != content:
        with replacing(pointer) as temporary:
            temporary.write_text(content)
            temporary.chmod(0o644)  # for whoever rolls it out
    return published


def card(registry: Registry, version: Version, family: str, target: str, licence: str) -> str:
    """Return the model card of a draft."""
    lineage, line = version.lineage, ancestors(registry, version)
    fields = {"base_model": target, "tags": ["speculative-decoding", family, "redraft"]}
    if licence:
        fields["license"] = licence
    windows = [
        f"draft {one.number}: rows {window.first_seq} to {window.last_seq} of the query log, sha256 {window.sha256}"
        for one in reversed(line)
        if (window := one.lineage.window) is not None
    ]
    trained = [f"{len(line)} drafts: {', '.join(str(one.number) for one in reversed(line))}", *windows]
    settings = {
        "K": lineage.num_draft_tokens,
        "seed": lineage.seed,
        "git commit": lineage.git_commit or None,
        "source": lineage.source or None,
        "teachers": json.dumps(lineage.teachers) if lineage.teachers else None,
    }
    gate = lineage.gate or "none: the first draft of its line"
    return "\n".join(
        [
            "---",
            *(f"{name}: {json.dumps(value)}" for name, value in fields.items()),
            "---",
            "",
            f"# Draft {version.number} for {lineage.target.name}",
            "",
            f"A draft model of family {family} for speculative decoding. `vllm serve .` in this directory serves the",
            "target with it. The output stays the target's; only its speed depends on the draft.",
            "",
            f"- Target: `{target}`, sha256 {lineage.target.sha256}, tokenizer {lineage.target.tokenizer_sha256}",
            f"- Gate: {gate}{f' ({lineage.gate_reasons})' if lineage.gate_reasons else ''}",
            "",
            "| domain | mean accepted length τ, tokens a step, on held-out conversations |",
            "|---|---|",
            *(f"| {domain} | {tau:.3f} |" for domain, tau in lineage.tau.items()),
            "",
            "## Training",
            "",
            *(f"- {one}" for one in trained),
            *(f"- {name}: {value}" for name, value in settings.items() if value is not None),
            "",
            "## Limits",
            "",
            "τ holds for traffic like that of its domains, at the temperatures at which that was served. With another",
            "target or tokenizer it drafts at random. It holds no rows of the log; what it drafts may reflect them.",
            "",
        ]
    )
