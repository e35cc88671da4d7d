"""A home is kept in one file while others write to it, and is served from what came back."""

import asyncio
import json
import os
import shutil
import sqlite3
import tarfile
import time
from contextlib import closing
from pathlib import Path

import pytest

from infra import erase
from infra.artifacts import check_manifest, staged
from infra.backup import CONTENTS, back_up, restore
from infra.home import home_secret, open_home
from infra.querylog import BackgroundWriter, QueryLog
from infra.registry import open_registry
from infra.settings import Settings
from models.engines import Sampling
from models.engines.torch import Params, TorchEngine
from models.targets import describe
from tests.conftest import ODD_NAME, make_draft
from tests.infra.rows import row
from tests.tags import draft_tags

HIS = b"a long sentence that nobody else ever wrote to the service"


@pytest.fixture(scope="module")
def made(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    with staged(folder / "target") as directory:
        shutil.copytree(tiny_target, directory, dirs_exist_ok=True)
    for seed in range(2):
        (folder / str(seed)).mkdir()
        make_draft(tiny_target, folder / str(seed), seed)
    return folder


@pytest.fixture
def settings(made: Path, store: Path, tmp_path: Path) -> Settings:
    """A home of a hundred rows, a target and two drafts, of which the second is the champion."""
    settings = Settings(home=tmp_path / ODD_NAME)
    open_home(settings)
    home_secret(settings.home)
    shutil.copy(store, settings.home / "mlflow.db")
    QueryLog(settings.querylog).append([row(f"a{number}") for number in range(1, 101)])
    registry = open_registry(settings)
    registry.promote("target", registry.register("target", made / "target", {}).number)
    for seed in range(2):
        registry.promote("draft", registry.register("draft", made / str(seed), draft_tags()).number)
    return settings


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    return tmp_path / "kept.tar"


def champion(settings: Settings) -> int:
    found = open_registry(settings).champion("draft")
    assert found is not None
    return found.number


def serve(settings: Settings) -> tuple[int, ...]:
    """Answer a prompt with the champions of a home, from files that only the registry names."""
    registry = open_registry(settings)
    pair = [registry.champion("target"), registry.champion("draft")]
    target, draft = (registry.download(one, settings.cache) for one in pair if one is not None)
    assert describe(target).vocab_size

    async def answer() -> tuple[int, ...]:
        engine = await TorchEngine.start(target, draft, Params(), draft_version="2")
        done = await engine.generate([7, 30, 12, 44], Sampling(max_tokens=12), "one")
        await engine.close()
        assert sum(done.drafted) > 0
        return done.token_ids

    return asyncio.run(answer())


@pytest.mark.slow
def test_what_was_backed_up_while_rows_came_in_is_served_from_an_empty_home(settings, kept, tmp_path) -> None:
    wanted, writer = serve(settings), BackgroundWriter(QueryLog(settings.querylog))
    paths = f"why is {settings.home}/mlflow.db so large? file://{settings.artifacts}/x"
    QueryLog(settings.querylog).append([row("paths").model_copy(update={"prompt": paths, "completion": paths})])
    for number in range(200):
        writer.offer(row(f"new-{number}"))
        if number == 100:
            back_up(settings, kept)
    writer.close()
    assert (writer.written, writer.dropped, kept.stat().st_mode & 0o777) == (200, 0, 0o600)
    shutil.rmtree(settings.home)
    elsewhere = Settings(home=tmp_path / "an other place")
    open_home(elsewhere)
    contents, copies = restore(elsewhere, kept, wait_s=0)
    assert (contents.home, copies) == (str(settings.home), None)
    log = QueryLog(elsewhere.querylog)
    assert 100 <= log.stats().total <= 301
    assert [(one.prompt, one.completion) for one in log.rows(1, 10**6) if one.id == "paths"] == [(paths, paths)]
    assert champion(elsewhere) == 2
    assert serve(elsewhere) == wanted
    assert home_secret(elsewhere.home)
    assert [path for path in elsewhere.home.rglob("*") if path.stat().st_mode & 0o077] == []
    assert not list(elsewhere.home.glob(".restore-*"))


def test_a_home_that_runs_goes_on_with_what_came_back_once_nobody_reads_rows(settings: Settings, kept: Path) -> None:
    back_up(settings, kept)
    with QueryLog(settings.querylog).reading(), pytest.raises(TimeoutError, match="is at its rows"):
        restore(settings, kept, wait_s=0)
    registry, writer = open_registry(settings), BackgroundWriter(QueryLog(settings.querylog))
    writer.offer(row("after-the-backup"))
    registry.roll_back("draft")
    while not writer.written:
        time.sleep(0.01)
    _, copies = restore(settings, kept, wait_s=0)
    assert champion(settings) == 2
    writer.offer(row("after-the-restore"))  # by the connection that was open all the while
    writer.close()
    assert (writer.written, writer.dropped) == (2, 0)
    log = QueryLog(settings.querylog)
    assert [(found.seq, found.id) for found in log.latest(1)] == [(101, "after-the-restore")]
    assert copies is not None
    with closing(sqlite3.connect(copies / "queries.db")) as before:
        assert before.execute("SELECT id FROM rows WHERE seq = 101").fetchone() == ("after-the-backup",)


def test_a_torn_log_is_set_aside_and_a_service_that_lost_rows_meanwhile_logs_again(settings, kept) -> None:
    log = QueryLog(settings.querylog)
    back_up(settings, kept)
    log.close()
    for one in settings.home.glob("queries.db*"):
        one.unlink()
    settings.querylog.write_bytes(b"torn" * 4096)
    writer = BackgroundWriter(QueryLog(settings.querylog))
    writer.offer(row("lost"))
    while not writer.dropped:
        time.sleep(0.01)
    _, copies = restore(settings, kept, wait_s=0)
    writer.offer(row("later"))
    writer.close()
    stats = log.stats()
    assert (writer.dropped, stats.dropped, stats.total, log.latest(1)[0].id) == (1, 1, 101, "later")
    assert copies is not None
    assert (copies / "queries.db.torn").read_bytes() == b"torn" * 4096


@pytest.mark.slow
def test_what_was_erased_since_is_erased_again(settings: Settings, kept: Path) -> None:
    log = QueryLog(settings.querylog)
    his = row("his", subject="b" * 64).model_copy(update={"prompt": HIS.decode()})
    log.append([row("hers", subject="a" * 64), his])
    back_up(settings, kept)
    erase.erase_subject(settings, "a" * 64, 0)
    restore(settings, kept, wait_s=0)
    assert [found.id for found in log.latest(1)] == ["his"]
    assert not [found for found in log.rows(1, 10**6) if found.subject == "a" * 64]
    assert b"hers" not in settings.querylog.read_bytes()
    copied = [one for one in (settings.home / "backups").rglob("*.db") if HIS in one.read_bytes()]
    assert copied
    erase.erase_subject(settings, "b" * 64, 0)
    assert not [one for one in settings.home.rglob("*.db*") if HIS in one.read_bytes()]


def test_what_is_no_whole_backup_of_this_home_changes_nothing(settings, kept, tmp_path) -> None:
    back_up(settings, kept)
    whole = kept.read_bytes()
    place = whole.index(b"SQLite format 3") + 5000
    flipped = whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :]
    for name, content in {"torn": whole[: len(whole) // 3], "none": b"x" * 4096, "flipped": flipped}.items():
        (tmp_path / name).write_bytes(content)
    with tarfile.open(tmp_path / "other", "w") as archive:
        contents = {"home_format": 99, "log_schema": 4, "made_ms": 0, "home": "", "artifacts": "", "files": {}}
        (tmp_path / CONTENTS).write_text(json.dumps(contents))
        archive.add(tmp_path / CONTENTS, CONTENTS)
    before = QueryLog(settings.querylog).stats()
    for bad, fault in (
        ("torn", "is no backup of redraft's, or it is torn"),
        ("none", "is no backup of redraft's"),
        ("flipped", "is damaged"),
        ("other", "was taken by another version"),
        ("absent", "there is no file .*absent"),
    ):
        with pytest.raises(ValueError, match=fault):
            restore(settings, tmp_path / bad, wait_s=0)
    os.unlink(settings.home / "split.key")
    home_secret(settings.home)
    with pytest.raises(ValueError, match="was taken of another home"):
        restore(settings, kept, wait_s=0)
    assert QueryLog(settings.querylog).stats().model_copy(update={"bytes": before.bytes}) == before
    with pytest.raises(ValueError, match="holds nothing yet"):
        back_up(Settings(home=tmp_path / "empty"), kept)
    with pytest.raises(ValueError, match="can't be written"):
        back_up(settings, tmp_path / "no folder" / "kept.tar")


def test_weights_that_stay_where_their_owner_has_them_are_named_and_not_copied(settings, kept, tmp_path) -> None:
    own, place = tmp_path / "own.safetensors", Path("complete_target", "one", "model.safetensors")
    own.write_bytes(b"weights")
    with staged((settings.local_artifacts / place).parent) as directory:
        (directory / place.name).symlink_to(own)
    back_up(settings, kept)
    empty, other = (Settings(home=tmp_path / name) for name in ("empty", "other"))
    for one in (empty, other):
        one.home.mkdir()
    for _ in range(2):  # again into what is there
        restore(empty, kept, 5.0)
        assert (empty.local_artifacts / place).readlink() == own
    assert check_manifest((empty.local_artifacts / place).parent)
    with tarfile.open(kept, "a") as archive:
        escaping = tarfile.TarInfo("artifacts/escaping")
        escaping.type, escaping.linkname = tarfile.SYMTYPE, "/etc"
        archive.addfile(escaping)
    with pytest.raises(ValueError, match="is no backup of redraft's, or it is torn"):
        restore(other, kept, 5.0)
