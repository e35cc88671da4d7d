"""Copies of the target, of the served draft's line and of its log, in a home of a benchmark's own."""

import shutil
import sqlite3
from contextlib import closing

from infra.artifacts import Artifact, publish
from infra.lines import ancestors
from infra.registry import open_registry
from infra.secret import NAME, home_secret
from infra.settings import Settings
from infra.versions import Kind, Pair
from models.types import Frozen
from tasks.promote import MADE_BY

COPIED = "copied.json"


class Served(Frozen):
    """What a home's registry holds, numbered from 1.

    Attributes:
        originals: the numbers that the drafts have in the registry they were copied from, oldest first; the first was
            trained from nothing, the last is the champion.
    """

    originals: tuple[int, ...]

    @property
    def champion(self) -> int:
        """The number of the champion's copy; that of the first draft is 1."""
        return len(self.originals)


def copy_served(source: Settings, home: Settings) -> Served:
    """Register copies of the champion target, the champion draft and the drafts that it descends from.

    A copy that was not finished is made anew.

    Raises:
        ValueError: nothing was built yet.
    """
    file = home.home / COPIED
    if file.is_file():
        return Served.model_validate_json(file.read_bytes())
    registry = open_registry(source)
    target, draft = registry.champion("target"), registry.champion("draft")
    if target is None or draft is None:
        raise ValueError("the registry has no champion target and draft yet; run: redraft build")
    line = ancestors(registry, draft)[::-1]
    fetched = home.home / "fetched"
    for path in (fetched, home.artifacts, home.cache):
        shutil.rmtree(path, ignore_errors=True)
    for path in home.home.glob("mlflow.db*"):
        path.unlink()
    copies = open_registry(home)
    made_by = {MADE_BY: target.tags[MADE_BY]} if MADE_BY in target.tags else {}  # a recipe is known by it
    copied = copies.register("target", registry.download(target, fetched), target.target.to_tags() | made_by)
    copies.promote("target", copied.number)
    for number, version in enumerate(line, start=1):
        # Whom it was gated against may not be among the copies.
        numbers = {"parent": number - 1 or None, "gated_against": None, "target_version": copied.number}
        lineage = version.lineage.model_copy(update=numbers)
        copies.register("draft", registry.download(version, fetched), lineage.to_tags())
        copies.promote("draft", number)
    shutil.rmtree(fetched)
    served = Served(originals=tuple(version.number for version in line))
    file.write_text(served.model_dump_json() + "\n")
    return served


def files_of(home: Settings, kind: Kind, number: int) -> Artifact:
    """Return the files of a copy."""
    registry = open_registry(home)
    return publish(registry.download(registry.get(kind, number), home.cache), kind)


def first_pair(home: Settings) -> Pair:
    """Return the target and the first draft of the line that was copied."""
    registry = open_registry(home)
    return Pair(
        target=registry.get("target", 1),
        draft=registry.get("draft", 1),
        target_files=files_of(home, "target", 1),
        draft_files=files_of(home, "draft", 1),
    )


def copy_log(source: Settings, home: Settings) -> None:
    """Copy the query log as it stands, with its cursor, its regression sets and the secret that draws splits, once.

    Raises:
        ValueError: nothing was logged.
    """
    if home.querylog.is_file():
        return
    if not source.querylog.is_file():
        raise ValueError(f"there is no query log {source.querylog}; serve some requests first, or run: redraft demo")
    home.querylog.parent.mkdir(parents=True, exist_ok=True)
    home_secret(source.home)  # one that was never drawn is drawn there, so that both split alike
    shutil.copy(source.home / NAME, home.home / NAME)
    temporary = home.querylog.with_suffix(".copying")
    temporary.unlink(missing_ok=True)
    with closing(sqlite3.connect(source.querylog)) as rows, closing(sqlite3.connect(temporary)) as copy:
        rows.backup(copy)
    temporary.replace(home.querylog)
