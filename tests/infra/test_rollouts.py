"""Where attached servers stand is read from the files of the processes that still follow them."""

import os
from pathlib import Path

import pytest

from infra import rollouts
from infra.identity import process_identity
from infra.rollouts import AttachedServer, RolloutState, attached_servers, read_rollout, write_rollout

ROWS = (
    AttachedServer(version="2-abc", wave=0, server="http://a", state="serving"),
    AttachedServer(wave=1, server="http://b", state="away"),
)


def file(home: Path, name: str = "one") -> Path:
    return home / rollouts.FOLDER / f"{rollouts.PREFIX}{name}.json"


def test_the_servers_of_all_running_processes_are_told(tmp_path: Path) -> None:
    assert attached_servers(tmp_path) == ()
    write_rollout(file(tmp_path), RolloutState(rows=ROWS[:1]))
    write_rollout(file(tmp_path, "two"), RolloutState(rows=ROWS[1:]))
    (tmp_path / rollouts.FOLDER / "memory.json").write_text("{}")
    file(tmp_path, "damaged").write_text("{")
    assert attached_servers(tmp_path) == ROWS


@pytest.mark.parametrize("pid", [os.getpid(), 2**22 + 1], ids=["another of its number", "ended"])
def test_a_process_that_ended_follows_none_and_leaves_what_was_proven(tmp_path: Path, pid: int) -> None:
    write_rollout(file(tmp_path), RolloutState(rows=ROWS, proven=("2-abc",)))
    record = read_rollout(file(tmp_path))
    assert record is not None and record.identity == process_identity(os.getpid())
    left = rollouts.RolloutRecord(pid=pid, identity="boot 1", rollout=record.rollout)
    file(tmp_path).write_text(left.model_dump_json())
    assert attached_servers(tmp_path) == ()
    assert read_rollout(file(tmp_path)) == left
