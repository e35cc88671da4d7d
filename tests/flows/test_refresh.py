"""Refreshes on top of a tiny build, by the command. Drills kill them (tests/drills/test_pipeline.py)."""

import sqlite3
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path

import httpx
import pytest

from infra.consent import QueryRow
from infra.querylog import QueryLog
from tests.flows.conftest import registry_of

pytestmark = pytest.mark.engine


def test_with_too_few_rows_there_is_nothing_to_do_and_each_row_is_trained_on_once(
    home, rows, cli_in, orchestrator, tmp_path
):
    cli, log = cli_in(home, HOME=str(tmp_path / "user")), QueryLog(home / "queries.db")
    log.append(rows[:20])
    assert "nothing to do: 20 rows wait, 60 are wanted" in cli.run("refresh", "--recipe", "tiny")
    assert registry_of(home).champion("draft").number == 1
    log.append(rows[20:])
    output = cli.run("refresh", "--recipe", "tiny")
    versions = registry_of(home).versions("draft")
    assert [version.number for version in versions] == [2, 1]
    assert "promoted: draft 2" in output
    champion = registry_of(home).champion("draft")
    assert champion.number == 2
    assert champion.tags["parent"] == "1"
    assert (champion.tags["window_first_seq"], champion.tags["window_last_seq"]) == ("1", str(len(rows)))
    assert champion.tags["gate"] == "passed"
    assert (log.windows.cursor(), log.stats().depth) == (len(rows), 0)

    _forget_commit(home)  # as if the run had died between the promotion and the commit
    assert "already trained: draft 2" in cli.run("refresh", "--recipe", "tiny")
    assert log.windows.cursor() == len(rows)
    assert len(registry_of(home).versions("draft")) == 2
    of_rows = f"refresh 1–{len(rows)} → draft 2"
    names = [run["name"] for run in httpx.post(f"{orchestrator}/flow_runs/filter", json={}, trust_env=False).json()]
    assert not (tmp_path / "user").exists()  # nothing is written to the user's own folder
    assert {"refresh, nothing to do", f"{of_rows}, promoted", f"{of_rows}, already trained"} <= {*names}


def text_of(row: QueryRow) -> str:
    """Return the start of an answer as it stands in a file."""
    return ", ".join(map(str, row.completion_ids[:12]))


def test_after_an_erasure_nothing_of_a_persons_rows_is_left_and_the_next_refresh_goes_on(home, rows, cli_in):
    cli, log, who = cli_in(home), QueryLog(home / "queries.db"), "e" * 64
    mine = rows[::4]
    said_by_others = [text_of(row) for row in rows if row not in mine]

    def found(needles: Iterable[bytes]) -> list[str]:
        log.close()  # else what is read here takes its locks away
        files = [file.read_bytes() for file in home.rglob("*") if file.is_file()]
        return [needle.decode() for needle in needles if any(needle in file for file in files)]

    # A random target gives many the same answer; what others were answered too, in the build as well, stays.
    needles = {f'"{row.id}"'.encode() for row in mine}
    for row in mine:
        if (said := text_of(row)) not in "\n".join(said_by_others):
            needles |= {said.encode(), said.replace(", ", ",").encode()}
    needles -= {needle.encode() for needle in found(needles)}
    assert len(needles) > len(mine)
    log.append([row.model_copy(update={"subject": who if n % 4 == 0 else None}) for n, row in enumerate(rows)])
    cli.run("refresh", "--recipe", "tiny")
    assert len(found(needles)) > len(mine)
    said = cli.run("erase", "--subject", who)
    assert f"erased {len(mine)} rows" in said and "1 snapshots written again" in said
    assert "draft 2 saw" in said and " as train" in said and " as held_out" in said
    assert found(needles) == []
    log.append([row.model_copy(update={"id": f"new {row.id}"[:128].replace(" ", "-")}) for row in rows[1::2]])
    assert "draft 3" in cli.run("refresh", "--recipe", "tiny")
    assert registry_of(home).get("draft", 3).lineage.window.first_seq == len(rows) + 1


def _forget_commit(home: Path) -> None:
    with closing(sqlite3.connect(home / "queries.db", isolation_level=None)) as db:
        db.execute("DELETE FROM committed")
        db.execute("UPDATE counters SET value = 0 WHERE name = 'cursor'")
