"""A refresh that is killed wherever it hurts, one that diverges, one whose disk is full."""

import os
import shutil
import signal
import sqlite3
import subprocess
import time
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path

import pytest

from infra.consent import QueryRow
from infra.processes import wait_until
from infra.querylog import QueryLog
from tests.drills.scene import filled, small_disk
from tests.flows.conftest import ENDS_S, Cli, registry_of

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1500)]
RECIPE = Path(__file__).parents[2] / "models" / "recipes" / "tiny.toml"


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    """The tiny recipe with a checkpoint after every step."""
    file = tmp_path / "drill.toml"
    file.write_text('name = "tiny"\n' + RECIPE.read_text().replace("[distill]\n", "[distill]\ncheckpoint_s = 0.0\n"))
    return str(file)


def test_f4_f5_f6_a_refresh_killed_in_a_step_in_a_save_and_before_the_alias_moved_goes_on_each_time(
    home: Path, rows: list[QueryRow], recipe: str, cli_in: Callable[[Path], Cli]
) -> None:
    cli, log, drafts = cli_in(home), QueryLog(home / "queries.db"), home / "artifacts" / "draft"
    log.append(rows)
    made = {path.name for path in drafts.iterdir()}

    def require_nothing_happened() -> None:
        assert _drafts(home) == (1, [1])
        assert {path.name for path in drafts.iterdir() if not path.name.startswith(".")} == made
        assert log.windows.cursor() == 0

    first = cli.start("refresh", "--recipe", recipe)
    wait_until(lambda: _one(home / "queries.db", "SELECT count(*) FROM claim") == 1, ENDS_S, None, "the claim")
    os.kill(first.pid, signal.SIGSTOP)  # it holds the window while another one asks for it
    with cli.start("refresh", "--recipe", recipe) as second:
        told, _ = second.communicate(timeout=ENDS_S)
    assert (second.returncode, "the open window belongs to refresh" in told) == (2, True), told
    os.kill(first.pid, signal.SIGCONT)
    _kill_when(first, lambda: any((home / "artifacts" / "work").glob("*/checkpoint.safetensors")))
    require_nothing_happened()

    _kill_when(cli.start("refresh", "--recipe", recipe), lambda: any(drafts.glob(".staging-*/model.safetensors")))
    require_nothing_happened()

    with closing(sqlite3.connect(home / "queries.db", isolation_level=None)) as db:
        db.execute("DELETE FROM attempts")  # after the third kill the window would be set aside
    registered = "SELECT count(*) FROM model_versions WHERE name = 'draft' AND version = 2"
    _kill_when(cli.start("refresh", "--recipe", recipe), lambda: _one(home / "mlflow.db", registered) == 1)
    assert (_drafts(home), log.windows.cursor()) == ((1, [2, 1]), 0)

    cli.run("refresh", "--recipe", recipe)
    assert _drafts(home) == (2, [2, 1])
    window = registry_of(home).get("draft", 2).lineage.window
    assert window is not None
    assert (window.first_seq, window.last_seq) == (1, len(rows))
    assert (log.windows.cursor(), log.stats().depth) == (len(rows), 0)
    assert list(drafts.glob(".staging-*")) == []


def test_f11_f17_a_refresh_that_diverges_or_whose_disk_is_full_changes_nothing_and_says_so(
    home: Path, rows: list[QueryRow], recipe: str, cli_in: Callable[[Path], Cli]
) -> None:
    cli, log, artifacts = cli_in(home), QueryLog(home / "queries.db"), home / "artifacts"
    log.append(rows)
    wild = Path(recipe).with_name("wild.toml")
    wild.write_text(Path(recipe).read_text().replace("num_epochs = 24", "num_epochs = 24, learning_rate = 1e30"))

    def require_unchanged(num_attempts: int, error: str) -> None:
        attempt = log.stats().attempt
        assert attempt is not None
        assert (_drafts(home), log.windows.cursor()) == ((1, [1]), 0)
        assert (attempt.number, attempt.running, error in attempt.error) == (num_attempts, False, True)
        assert list(artifacts.rglob(".staging-*")) == []
        assert error in cli.run("status")

    with cli.start("refresh", "--recipe", str(wild)) as diverging:
        told, _ = diverging.communicate(timeout=ENDS_S)
    assert (diverging.returncode, "the draft is discarded and its parent stays" in told) == (1, True), told
    require_unchanged(1, "the loss is")

    shutil.move(artifacts, home / "aside")
    with small_disk(artifacts) as is_small:
        if not is_small:
            pytest.skip("mounting a small disk is not allowed here")
        shutil.copytree(home / "aside", artifacts, dirs_exist_ok=True)
        with cli.start("refresh", "--recipe", recipe) as full:
            begun = (artifacts / "work").glob
            wait_until(lambda: any(begun("*/checkpoint.safetensors")), ENDS_S, None, "a step of the training")
            with filled(artifacts):
                told, _ = full.communicate(timeout=ENDS_S)
        assert (full.returncode != 0, "No space left on device" in told) == (True, True), told
        require_unchanged(2, "No space left on device")
        cli.run("refresh", "--recipe", recipe)
        assert _drafts(home)[1] == [2, 1]
        assert (log.windows.cursor(), log.stats().depth) == (len(rows), 0)


def _drafts(home: Path) -> tuple[int | None, list[int]]:
    """Return the champion and all drafts of a home."""
    registry = registry_of(home)
    champion = registry.champion("draft")
    return None if champion is None else champion.number, [version.number for version in registry.versions("draft")]


def _kill_when(process: subprocess.Popen[str], ready: Callable[[], bool]) -> None:
    """Kill a command and all that it started as soon as `ready`, which must come before its end."""
    with process:
        while not ready():
            assert process.poll() is None, process.communicate()[0]
            time.sleep(0.02)
        process.kill()
        process.wait()
        with suppress(ProcessLookupError):  # where there is a server already, it started none of its own
            os.killpg(process.pid, signal.SIGKILL)


def _one(database: Path, query: str) -> int:
    with closing(sqlite3.connect(database, timeout=60)) as db:
        return int(db.execute(query).fetchone()[0])
