"""Progress of post-promotion tests: one file for each draft and the one before it, below the home folder.

A file is replaced as a whole after each look, so that a killed process resumes after its last whole look and no request
counts twice. There is no text in it: requests are named by their number in the query log.
"""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from pydantic import Field

from infra.files import lock_file, write_atomic
from infra.settings import Settings
from models.types import ALL, Finding, Frozen

RUNNING: Literal["running"] = "running"
FAILED: Literal["failed"] = "failed"
ROLLED_BACK: Literal["rolled back"] = "rolled back"
SUPERSEDED: Literal["superseded"] = "superseded"
PASSED: Literal["passed"] = "passed"
POST_PROMOTION, WORK = "post_promotion", "work"


class Compared(Frozen):
    seq: int = Field(ge=1)
    domain: str
    tau: float = Field(ge=1, allow_inf_nan=False)
    previous_tau: float = Field(ge=1, allow_inf_nan=False)


class PostPromotionTest(Frozen):
    """The test of a promoted draft against the one before it.

    Attributes:
        outcome: "failed" asks for a rollback; "superseded" says that somebody replaced the draft before that.
        num_wanted: requests that are compared without a loss until it passes.
        num_readable, num_unreadable: requests that the draft served lately and that may be read, and that may not; one
            without any consent leaves no row and is in neither.
        found: domain to what its requests say; "" stands for all.
        evidence: the run in MLflow that keeps why it was rolled back.
    """

    draft: int
    previous: int
    outcome: Literal["running", "failed", "rolled back", "superseded", "passed"] = RUNNING
    looked_ms: int = 0
    num_wanted: int
    num_readable: int = 0
    num_unreadable: int = 0
    compared: tuple[Compared, ...] = ()
    found: dict[str, Finding] = Field(default_factory=dict)
    evidence: str = ""

    @property
    def blind(self) -> bool:
        return self.outcome == RUNNING and not self.num_readable

    @property
    def losses(self) -> dict[str, Finding]:
        return {domain: found for domain, found in self.found.items() if found.lost}

    def told(self) -> str:
        if self.blind:
            seen = f"none of the last {self.num_unreadable} requests" if self.num_unreadable else "no request"
            return f"blind, {seen} of draft {self.draft} may be read"
        if (whole := self.found.get(ALL)) is None:
            return "no request compared yet"
        line = (
            f"τ {whole.tau:.2f} against {whole.previous_tau:.2f} of draft {self.previous} "
            f"on the same {whole.num_requests} requests"
        )
        for domain, found in self.losses.items():
            taus = f'; "{domain}" τ {found.tau:.2f} against {found.previous_tau:.2f} on {found.num_requests}'
            beyond = f" than a loss of {found.allowed:.0%}" if found.allowed else ""
            sure = f"{1 - found.alpha:.1%} sure"
            line += f"{taus if domain else ''}, at least {found.excess_low:.3f} steps a token more{beyond} ({sure})"
        return line


class PostPromotionTests:
    def __init__(self, settings: Settings) -> None:
        self.folder = settings.home / POST_PROMOTION

    def sweep(self) -> None:
        """Remove what a look that was killed left behind: it may hold text."""
        shutil.rmtree(self.folder / WORK, ignore_errors=True)

    @contextmanager
    def workspace(self) -> Iterator[Path]:
        """Yield an empty folder, for hidden states and the like, that is gone when the block ends."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.sweep()
        (self.folder / WORK).mkdir(mode=0o700)
        try:
            yield self.folder / WORK
        finally:
            self.sweep()

    def find(self, draft: int, previous: int) -> PostPromotionTest | None:
        file = self._file(draft, previous)
        return PostPromotionTest.model_validate_json(file.read_bytes()) if file.is_file() else None

    def of_draft(self, draft: int) -> PostPromotionTest | None:
        files = sorted(self.folder.glob(f"{draft}-*.json"), key=lambda file: file.stat().st_mtime_ns)
        return PostPromotionTest.model_validate_json(files[-1].read_bytes()) if files else None

    def unfinished(self) -> list[PostPromotionTest]:
        files = sorted(self.folder.glob("[0-9]*-*.json"))
        tests = [PostPromotionTest.model_validate_json(file.read_bytes()) for file in files]
        return [test for test in tests if test.outcome == FAILED]

    def save(self, test: PostPromotionTest) -> None:
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_atomic(self._file(test.draft, test.previous), test.model_dump_json() + "\n")

    @contextmanager
    def alone(self, wait_s: float = 0.0) -> Iterator[None]:
        """Keep other processes from testing the drafts of this home; ValueError if another one does.

        It may take `wait_s` seconds to end: one that was killed holds on for a moment.
        """
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with lock_file(self.folder / ".lock", wait_s=wait_s) as is_held:
            if not is_held:
                raise ValueError(f"another process tests the promoted drafts of {self.folder.parent}")
            yield

    def _file(self, draft: int, previous: int) -> Path:
        return self.folder / f"{draft}-{previous}.json"
