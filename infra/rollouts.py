"""Where the vLLM servers stand whose draft a process keeps at the champion, in a file for each such process."""

import os
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from infra.files import write_atomic
from infra.identity import process_identity
from models.types import Frozen

FOLDER, PREFIX = "attached", "rollout-"


class DraftCounts(Frozen):
    """What a server's metrics count since its draft serves: verification steps, and tokens that were accepted.

    `per_position` says of each place of a draft in how many steps it was accepted.
    """

    steps: int
    drafted: int
    accepted: int
    per_position: tuple[int, ...]

    def told(self) -> str:
        if not self.steps:
            return "nothing was drafted since it serves"
        places = ", ".join(f"{count / self.steps:.2f}" for count in self.per_position)
        tau = f"τ {1 + self.accepted / self.steps:.2f} over {self.steps:,} steps of all domains"
        return f"{tau}, accepted by position {places}"


class AttachedServer(Frozen):
    """Where a server stands; of wave 0 is the one that tries new drafts.

    `version` is "" before it is known, and so is `name`, by which rows of the query log name the server. `counts` is
    None where metrics are not read.
    """

    version: str = ""
    wave: int
    server: str
    name: str = ""
    counts: DraftCounts | None = None
    state: Literal["starting", "away", "serving"] = "starting"


class RolloutState(Frozen):
    """Where all servers of a process stand, in the order in which they are tried; `proven` drafts, the last first."""

    rows: tuple[AttachedServer, ...]
    proven: tuple[str, ...] = ()


class RolloutRecord(Frozen):
    """A file's content; `identity` tells the process from a later one of the same number."""

    pid: int
    identity: str
    rollout: RolloutState


def write_rollout(path: Path, rollout: RolloutState) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pid = os.getpid()
    identity = process_identity(pid)
    assert identity is not None
    write_atomic(path, RolloutRecord(pid=pid, identity=identity, rollout=rollout).model_dump_json(indent=1))


def read_rollout(path: Path) -> RolloutRecord | None:
    """Return what a process wrote, running or not; None without a file that can be read."""
    try:
        return RolloutRecord.model_validate_json(path.read_bytes())
    except (OSError, ValidationError):
        return None


def attached_servers(home: Path) -> tuple[AttachedServer, ...]:
    """Return where the servers stand that the running processes of a home follow."""
    found = map(read_rollout, sorted((home / FOLDER).glob(f"{PREFIX}*")))
    return tuple(row for one in found if one and process_identity(one.pid) == one.identity for row in one.rollout.rows)
