"""What a home may remove, by count, age and bytes.

A version's entry in the registry stays; its files go, and tag `cleaned` says when. Never touched is what serves or may
serve again: the champions, the drafts that a rollback goes back to, the best ones that a floor holds others to, the
pool of past champions, the champion's challengers; nor what these were trained on and gated by, nor anything younger
than a day.
"""

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple, Protocol

from infra import history
from infra.artifacts import Manifest, forget, path_of, remove_unheld
from infra.files import LEFTOVER, discard, files_under, lock_folder
from infra.home import COPIES, compiled_folder, ray_folder
from infra.machine import process_identity
from infra.post_promotion import PostPromotionTests
from infra.querylog import QueryLog
from infra.registry import Registry, open_registry
from infra.settings import Settings
from infra.store import translated
from infra.trigger_store import TriggerStore
from infra.versions import (
    CLEANED,
    SNAPSHOT_TAGS,
    Version,
    best_versions,
    cached,
    is_usable,
    past_champions,
    predecessors,
    same_files,
)
from infra.windows import Window
from models.types import MANIFEST_NAME

DAY_S, YOUNG_DAYS = 24 * 3600.0, 1.0
NUM_COPIES, NUM_COMPILED = 5, 8
# Champions before the present one that a rollback may go back to.
NUM_BACK = 2
# A window after all others: no past champion was trained on its rows.
LATER = Window(first_seq=2**62, last_seq=2**62, num_rows=0, sha256="", owner="")


class Limits(Protocol):
    """How much is kept beyond what serves: what each means stands at table `[keep]` of a recipe."""

    @property
    def num_drafts(self) -> int: ...
    @property
    def days(self) -> float: ...
    @property
    def gib(self) -> float: ...
    @property
    def log_mib(self) -> float: ...


class Item(NamedTuple):
    """Something that may go; `version` is the draft whose files they are, `day` one of Prefect's history."""

    kind: str
    paths: tuple[Path, ...]
    num_bytes: int
    age_days: float
    version: Version | None = None
    day: str = ""

    @property
    def name(self) -> str:
        return f"draft {self.version.number}" if self.version else self.day or self.paths[0].name


def clean_up(settings: Settings, limits: Limits, pool: int, dry_run: bool = False) -> list[tuple[Item, str]]:
    """Remove what is beyond the limits, and return it, each with why; a dry run removes nothing.

    Of each domain `pool` past champions stay. TimeoutError while somebody is at rows, ConnectionError without registry.
    """
    log, registry = QueryLog(settings.querylog), open_registry(settings)
    with log.unread(wait_s=0), registry.alone():
        if TriggerStore(settings.querylog).state().running:
            raise TimeoutError("a refresh runs; clean after it")
        going = list(_going(settings, registry, limits, pool))
        for item, _ in going if not dry_run else ():
            _remove(item, registry)
        if any(item.day for item, _ in going) and not dry_run:
            history.compact(history.database(settings.home))
    return going


def kept_drafts(settings: Settings, registry: Registry, versions: Sequence[Version], pool: int) -> set[int]:
    champion = registry.champion("draft")
    if champion is None:
        return {version.number for version in versions}
    kept, last = {champion.number}, champion
    for _ in range(NUM_BACK):
        if (previous := registry.previous_good(last)) is not None:
            kept.add(previous.number)
            last = previous
    kept_tests = PostPromotionTests(settings)
    tests = [*kept_tests.unfinished(), kept_tests.of_draft(champion.number)]
    kept |= {number for test in tests if test is not None for number in (test.draft, test.previous)}
    line = [one for one in predecessors(registry, champion) if is_usable(one)]
    kept |= {one.number for one in best_versions(line).values()}
    k = champion.lineage.num_draft_tokens or 0
    for domain in {name for version in versions for name in version.lineage.tau}:
        kept |= {one.number for one in past_champions(versions, champion, domain, k, LATER)[:pool]}
    challengers = [one for one in versions if one.lineage.gate_champion == champion.number]
    kept |= {one.number for one in challengers if one.lineage.gate == "passed"}
    kept |= {one.number for one in [one for one in challengers if one.lineage.gate == "undecided"][:1]}
    return kept


def _going(settings: Settings, registry: Registry, limits: Limits, pool: int) -> Iterator[tuple[Item, str]]:
    versions = registry.versions("draft")
    kept = kept_drafts(settings, registry, versions, pool)
    target = registry.champion("target")
    staying = [*(() if target is None else (target,)), *(version for version in versions if version.number in kept)]
    candidates: list[Item] = []
    for rank, version in enumerate(versions):
        if version.number in kept or version.cleaned:
            continue
        item = _of_version(version, registry)
        if rank >= limits.num_drafts and item.age_days > YOUNG_DAYS:
            yield item, f"beyond the newest {limits.num_drafts}"
        else:
            candidates.append(item)
    candidates += _of_stages(settings, [*staying, *registry.versions("target")])
    copies = _aged("copy", settings.home / COPIES)
    yield from ((item, f"beyond the newest {NUM_COPIES}") for item in copies[NUM_COPIES:] if item.age_days > YOUNG_DAYS)
    candidates += copies[:NUM_COPIES]
    compiled = compiled_folder(settings.cache) / "torch_compile_cache" / "torch_aot_compile"
    candidates += _aged("compiled code", compiled, read=True)[NUM_COMPILED:]
    candidates += _aged("digest", settings.digests, read=True)
    candidates += [*_of_history(history.database(settings.home)), *_of_sessions(ray_folder(settings.home))]
    total = 0
    for item in sorted(candidates, key=lambda one: one.age_days):
        total += item.num_bytes
        if item.age_days > limits.days:
            yield item, f"older than {limits.days:g} days"
        elif total > limits.gib * 2**30 and item.age_days > YOUNG_DAYS:
            yield item, f"beyond {limits.gib:g} GiB"
    yield from _of_caches(settings, staying)
    for folder in _folders(settings.local_artifacts / "work"):
        item = _item("work", folder)
        with lock_folder(folder, wait_s=0) as is_free:
            if is_free and item.age_days > YOUNG_DAYS:
                yield item, "nobody works in it"
    for file in sorted((settings.home / "logs").glob("*.log")):
        if file.stat().st_size > limits.log_mib * 2**20:
            yield _item("log", file), f"its older half: beyond {limits.log_mib:g} MiB"


def _of_version(version: Version, registry: Registry) -> Item:
    uri = version.address
    if not uri:
        with translated(f"looking for the files of draft {version.number}"):
            uri = registry.store.client.get_model_version_download_uri(registry.model("draft"), str(version.number))
    stored = path_of(uri) if uri.startswith(("file:", "/")) else None
    there = () if stored is None or not stored.is_dir() else (stored,)  # a server's files are the server's to clean
    age_days = (time.time() - version.created_ms / 1000) / DAY_S
    return Item("draft", there, sum(_item("", path).num_bytes for path in there), age_days, version)


def _of_stages(settings: Settings, staying: Sequence[Version]) -> Iterator[Item]:
    named = {version.tags.get(tag, "") for version in staying for tag in SNAPSHOT_TAGS}
    digests = {version.sha256 for version in staying}
    for stage in _folders(settings.local_artifacts):
        if stage.name not in ("mlflow", "work"):
            for folder in _folders(stage):
                if folder.resolve().as_uri() not in named and _digest(folder) not in digests:
                    yield _item(stage.name, folder)


def _of_caches(settings: Settings, staying: Sequence[Version]) -> Iterator[tuple[Item, str]]:
    wanted = {cached(version, settings.cache) for version in staying}
    for kind in ("draft", "target"):
        for folder in _folders(settings.cache / kind):
            item = _item("cache", folder, read=True)
            with lock_folder(folder, wait_s=0) as is_free:
                if is_free and folder not in wanted and item.age_days > YOUNG_DAYS:
                    yield item, "it can be fetched again"


def _of_history(file: Path) -> Iterator[Item]:
    for day, num_bytes in history.days(file):
        ended_s = datetime.fromisoformat(day).replace(tzinfo=UTC).timestamp() + DAY_S
        yield Item("history", (file,), num_bytes, (time.time() - ended_s) / DAY_S, day=day)


def _of_sessions(folder: Path) -> Iterator[Item]:
    """Yield the sessions of Ray whose process has ended; a process that only has its number keeps one for a while."""
    for session in _folders(folder):
        pid = session.name.rpartition("_")[2]
        ended = pid.isdigit() and process_identity(int(pid)) is None
        if ended and session.name.startswith("session_") and not session.is_symlink():
            yield _item("session", session)


def _aged(kind: str, folder: Path, read: bool = False) -> list[Item]:
    return sorted((_item(kind, path, read) for path in sorted(folder.glob("*"))), key=lambda one: one.age_days)


def _folders(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("[!.]*") if path.is_dir() and not LEFTOVER.fullmatch(path.name))


def _item(kind: str, path: Path, read: bool = False) -> Item:
    """Measure what lies at a path. With `read`, reading a file makes it young; a folder never: this look reads it."""
    files = []
    for file in files_under(path) if path.is_dir() else [path]:
        with suppress(FileNotFoundError):  # whatever runs here may remove its files meanwhile
            files.append(file.lstat())
    touched = [path.stat().st_mtime, *(max(one.st_mtime, one.st_atime if read else 0.0) for one in files)]
    return Item(kind, (path,), sum(one.st_size for one in files), (time.time() - max(touched)) / DAY_S)


def _digest(folder: Path) -> str:
    file = folder / MANIFEST_NAME
    return Manifest.model_validate_json(file.read_bytes()).digest() if file.is_file() else ""


def _remove(item: Item, registry: Registry) -> None:
    if item.version is not None:  # the tag first: what is half gone is never taken for whole
        with translated(f"cleaning draft {item.version.number}"):
            registry.store.client.set_model_version_tag(
                registry.model("draft"), str(item.version.number), CLEANED, time.strftime("%F")
            )
        if item.version.address.startswith("s3:") and not same_files(registry.versions("draft"), item.version):
            forget(item.version.address)
    if item.day:
        history.forget(item.paths[0], item.day)
        return
    for path in item.paths:
        if item.kind == "log":
            _cut(path)
        elif item.kind == "cache":
            remove_unheld(path)
        elif path.is_dir():
            discard(path)
        else:
            path.unlink(missing_ok=True)


def _cut(file: Path) -> None:
    """Let the older half of a log go; whoever appends to it goes on."""
    with file.open("r+b") as opened:
        opened.seek(os.fstat(opened.fileno()).st_size // 2)
        opened.readline()
        kept = opened.read()
        opened.seek(0)
        opened.write(kept)
        opened.truncate()
