"""A draft's line of parents, as the registry's tags tell it.

A line starts with a draft that was trained from nothing, and all its tests spend one error budget. The tag `parent` is
the version that a draft was trained from; the registry's own `previous` is the champion that it replaced.
"""

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from infra.artifacts import Artifact
from infra.querylog import Window
from infra.registry import LINEAGE_TAGS, Registry, Version
from infra.settings import load_settings
from models.params import Frozen
from models.targets import TargetCard
from tasks.reporting import flow_run_id

ROOT = Path(__file__).parent.parent


class Pair(Frozen):
    """A target and the draft that is served with it: registry entries and checked local files."""

    target: Version
    draft: Version
    target_files: Artifact
    draft_files: Artifact


def open_registry() -> Registry:
    """Return the registry that the settings name."""
    settings = load_settings()
    return Registry(settings.mlflow_uri, settings.artifacts / "mlflow")


def ancestors(registry: Registry, version: Version) -> list[Version]:
    """Return a draft and its parents, newest first."""
    line = [version]
    while parent := line[-1].tags["parent"]:
        line.append(registry.get("draft", int(parent)))
    return line


def taus(version: Version) -> dict[str, float]:
    """Return domain to the τ that a draft was measured at before it was registered."""
    return json.loads(version.tags["tau"])


def best_versions(line: Sequence[Version]) -> dict[str, Version]:
    """Return domain to the version of a line that was best there; of equals, the newest."""
    best: dict[str, Version] = {}
    for version in line:
        for domain, tau in taus(version).items():
            if domain not in best or tau > taus(best[domain])[domain]:
                best[domain] = version
    return best


def next_test_index(versions: Sequence[Version], line: str) -> int:
    """Return which test of its line the next one is, from 1; refused candidates were tests too."""
    return 1 + max(
        (int(version.tags["gate_test"]) for version in versions if version.tags.get("line") == line), default=0
    )


def trained_on(versions: Sequence[Version], window: Window) -> list[Version]:
    """Return the versions that were trained on a window, newest first."""
    wanted = {
        "window_first_seq": str(window.first_seq),
        "window_last_seq": str(window.last_seq),
        "window_sha256": window.sha256,
    }
    return [version for version in versions if wanted.items() <= version.tags.items()]


def lineage_tags(target: Version, card: TargetCard, **tags: str) -> dict[str, str]:
    """Return the tags of a draft: those of its target and of this run, `tags`, and "" for what does not apply."""
    return {
        **dict.fromkeys(LINEAGE_TAGS, ""),
        **target_tags(card),
        "target_version": str(target.number),
        "git_commit": git_commit(),
        "flow_run": flow_run_id(),
        **tags,
    }


def target_tags(card: TargetCard) -> dict[str, str]:
    """Return what tells a target from others."""
    return {
        "target_name": card.name,
        "target_sha256": card.sha256,
        "tokenizer_sha256": card.tokenizer_sha256,
        "vocab_size": str(card.vocab_size),
        "chat_template_sha256": card.chat_template_sha256,
    }


def git_commit() -> str:
    """Return the commit that runs, "" outside a git checkout."""
    environment = {**os.environ, "GIT_CEILING_DIRECTORIES": str(ROOT.parent)}
    try:
        git = subprocess.run(
            ["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True, check=False, env=environment
        )
    except FileNotFoundError:  # git is not installed
        return ""
    return git.stdout.strip() if git.returncode == 0 else ""
