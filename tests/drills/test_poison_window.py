"""A window whose training always fails stops nothing: it is set aside, later windows train, and `status` says why."""

from pathlib import Path

import pytest

from infra.consent import QueryRow
from infra.querylog import QueryLog
from tests.flows.conftest import Cli, registry_of

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]
RECIPE = Path(__file__).parents[2] / "models" / "recipes" / "tiny.toml"
# The first step throws the weights so far that the second one has no loss.
LEARNS, EXPLODES = "distill = { num_epochs = 12 }", "distill = { learning_rate = 1e30 }"


def test_f30_a_window_whose_training_always_fails_is_set_aside_and_later_windows_train(
    home: Path, rows: list[QueryRow], tmp_path: Path, orchestrator: str
) -> None:
    cli, log = Cli(home, orchestrator), QueryLog(home / "queries.db")
    bad, good = tmp_path / "bad.toml", tmp_path / "good.toml"
    good.write_text('name = "tiny"\n' + RECIPE.read_text())
    assert LEARNS in good.read_text()
    bad.write_text(good.read_text().replace(LEARNS, EXPLODES))
    first, later = rows[:60], rows[60:]
    log.append(first)
    for attempt in range(1, 4):
        with cli.start("refresh", "--recipe", str(bad)) as failing:
            told, _ = failing.communicate(timeout=120)
        assert failing.returncode != 0, told
        seen = log.stats()
        assert (seen.attempt is None) == (attempt == 3)
    log.append(later)
    assert "FloatingPointError" in seen.set_aside[0].error
    assert (seen.set_aside[0].last_seq, seen.set_aside[0].num_attempts) == (60, 3)
    cli.run("refresh", "--recipe", str(good))
    window = registry_of(home).versions("draft")[0].lineage.window
    assert window is not None
    assert (window.first_seq, window.last_seq, log.cursor()) == (61, len(rows), len(rows))
    status = cli.run("status")
    assert "rows 1–60 are set aside since" in status
    assert "3 attempts failed: FloatingPointError: the loss is" in " ".join(status.split())
