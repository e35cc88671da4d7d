"""A window that can't be trained on, and one under which a person changes the champion."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from infra.consent import QueryRow
from infra.querylog import QueryLog
from tests.flows.conftest import ENDS_S, Cli, registry_of

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1200)]
NO_TOKEN = 1_000_000


def test_f30_a_window_whose_training_always_fails_is_set_aside_after_three_attempts_and_later_rows_train(
    home: Path, rows: list[QueryRow], cli_in: Callable[[Path], Cli]
) -> None:
    cli, log = cli_in(home), QueryLog(home / "queries.db")
    poison = [{"id": f"poison-{n}", "completion_ids": [NO_TOKEN + n] * 9} for n in range(60)]
    log.append([rows[0].model_copy(update={"prompt_ids": [NO_TOKEN] * 9, **spoiled}) for spoiled in poison])
    for _ in range(2):
        window = log.windows.claim("the run before", max_rows=400)
        assert window is not None
        assert not log.windows.fail(window, "IndexError")
    log.append(rows)
    with cli.start("refresh", "--recipe", "tiny") as failing:
        told, _ = failing.communicate(timeout=ENDS_S)
    assert failing.returncode != 0, told
    assert [version.number for version in registry_of(home).versions("draft")] == [1]
    [aside] = log.stats().set_aside
    assert (aside.first_seq, aside.last_seq, aside.error.partition(":")[0]) == (1, 60, "IndexError")
    assert "draft 2" in cli.run("refresh", "--recipe", "tiny")
    window = registry_of(home).get("draft", 2).lineage.window
    assert window is not None
    assert (window.first_seq, window.last_seq, log.stats().depth) == (61, 60 + len(rows), 0)
    assert "rows 1–60 are set aside" in cli.run("status")


def test_f31_what_a_person_does_while_a_refresh_trains_is_never_overwritten(
    home: Path, rows: list[QueryRow], cli_in: Callable[[Path], Cli], tmp_path: Path
) -> None:
    cli, log, registry = cli_in(home), QueryLog(home / "queries.db"), registry_of(home)
    first = registry.champion("draft")
    assert first is not None
    lineage = first.lineage.model_copy(update={"parent": 1})
    second = registry.register("draft", registry.download(first, tmp_path / "cache"), lineage.to_tags())
    log.append(rows)
    with cli.start("refresh", "--recipe", "tiny") as refresh:
        while (attempt := log.stats().attempt) is None or not attempt.running:
            assert refresh.poll() is None, refresh.communicate()[0]
            time.sleep(0.01)
        os.kill(refresh.pid, signal.SIGSTOP)  # held up in its work
        cli.run("promote", str(second.number), "--force", "a person says so")
        os.kill(refresh.pid, signal.SIGCONT)
        told, _ = refresh.communicate(timeout=ENDS_S)
    assert (refresh.returncode, "outdated: draft 3" in told) == (0, True), told
    champion = registry.champion("draft")
    assert champion is not None
    # The rows wait for the next champion's challenger.
    assert (champion.number, registry.get("draft", 3).lineage.parent, log.windows.cursor()) == (2, 1, 0)
