"""The whole stack that a soak runs: `redraft up` in a home on a small disk, its processes, its drafts, what it left."""

import re
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import httpx
import psutil

from infra.home import is_served
from infra.keys import bring_keys
from infra.processes import free_port, port_is_free, wait_until
from infra.querylog import QueryLog
from infra.registry import Registry
from infra.supervisor import read_state
from infra.versions import Version, is_usable
from models.core.evaluation.golden import Golden
from tests.drills.load import Client
from tests.drills.scene import register_changed
from tests.drills.spoiled import Spoil, noisy
from tests.flows.conftest import Cli, registry_of
from tests.soak.checker import Look
from tests.world import Served

RECIPE = Path(__file__).parents[2] / "models" / "recipes" / "tiny.toml"
# What clients ask is soon learnt: from 40 answers, in three passes, 0.35 tokens a step. Beside clients that never pause
# training has a tenth of the time, and a run that a fault ends begins anew.
NUM_EPOCHS = 3
SCHEDULE = "\n[schedule]\nrefresh_interval_s = 45\nretry_s = 2.0\n"
ROW_ID = re.compile(r"[0-9a-f]{32}")
# What each key lets be logged, and a word that stands in all that it asks and nowhere else.
MARKS = {"full": "qwheatear", "metadata": "qdotterel", "none": "qphalarope"}
# What clients ask; with the answers it fits the tiny target's context.
QUESTION = "{mark} {number}: what is {number} times {number}?"
NUM_PROMPTS = 4
CONSENTS = {f"a-key-that-logs-{log}": log for log in MARKS}
# A process by what its command line holds, in this order.
NAMES = (
    ("services.runner", "runner of the service"),
    ("ray::ServeController", "controller"),
    ("ray::ProxyActor", "proxy"),
    ("ray::ServeReplica", "replica"),
    ("VLLM", "engine"),
    ("ray::IDLE", "idle worker"),
    ("gcs_server", "gcs"),
    ("raylet/raylet", "raylet"),
    ("log_monitor", "log monitor"),
    ("monitor.py", "monitor"),
    ("ray::RuntimeEnvAgent", "agent of environments"),
    ("ray::DashboardAgent", "agent"),
    ("dashboard.py", "dashboard"),
    ("haproxy", "haproxy"),
    ("services.main", "service"),
    ("flows.deployments", "runner of flows"),
    ("flows.post_promotion", "post-promotion"),
    ("infra.auth_middleware:mlflow_page", "mlflow"),
    ("prefect.server", "prefect"),
    ("prefect", "run of a flow"),
)
# Without these the service answers as before.
ASIDE = frozenset({"controller", "dashboard", "idle worker", "log monitor", "monitor"})
# What is not started again by itself where it is the only thing that ended, or only when it is wanted.
NOT_BACK = frozenset({"dashboard", "idle worker", "log monitor", "monitor", "run of a flow", "other"})
SUPERVISOR, SERVICE = "supervisor", "service"


class Part(NamedTuple):
    """A process of the stack: what it is, and whether requests need it."""

    kind: str
    serves: bool
    returns: bool


class Stack(Served):
    """A built and served home.

    Attributes:
        home: lies on whatever disk `folder` lies on.
        askers: clients of three keys, who ask the same again and again.
        stroller: one of the first key, who always asks something new.
        looks: what the service said of its draft, twice a second.
        spoiled: drafts that must never serve.
    """

    def __init__(self, home: Path) -> None:
        """Build the tiny recipe in a new home and bring it up."""
        self.home, self.spoiled, self.looks = home, set[int](), list[Look]()
        self.cli = Cli(home)
        recipe = home / "soak.toml"
        text = RECIPE.read_text()
        self._port = free_port()
        changed = text.replace("port = 0", f"port = {self._port}").replace("poll_s = 1.0", "poll_s = 0.5")
        changed = changed.replace("num_epochs = 24", f"num_epochs = {NUM_EPOCHS}")
        recipe.write_text(f'name = "tiny"\n{changed}{SCHEDULE}')
        self._recipe = str(recipe)
        self.cli.run("build", "--recipe", self._recipe)
        bring_keys(home / "keys.json", list(CONSENTS.items()))
        self.askers = [Client(key, _questions(log, range(NUM_PROMPTS))) for key, log in CONSENTS.items()]
        # What is asked once is new to a refresh; who asks that has no answer of a quiet time to compare with.
        self.stroller = self.askers[0]._replace(prompts=_questions("full", range(1000, 9000)))
        self.up()
        super().__init__(f"http://127.0.0.1:{self._port}", home)
        self._look = threading.Thread(target=self._watch, daemon=True)
        self._ended = threading.Event()
        self._look.start()

    def up(self) -> None:
        """Bring it up, once nothing of an earlier time is in its way; some of Ray's agents end a minute later."""
        wait_until(self._is_down, 60, None, "the end of supervisor and service")
        self.cli.run("up", "--recipe", self._recipe)

    def down(self) -> None:
        """End all of it."""
        self._ended.set()
        self._look.join()
        if read_state(self.home) is not None:
            self.cli.run("down")

    @property
    def registry(self) -> Registry:
        """The home's own."""
        return registry_of(self.home)

    def parts(self) -> dict[Part, list[int]]:
        """Return the processes that run, by what they are."""
        if (state := read_state(self.home)) is None:
            return {}
        found = {Part(SUPERVISOR, serves=True, returns=True): [state.pid]}
        for program in state.programs:
            for kind, pid in _family(program.pid or 0):
                serves = program.name == SERVICE and kind not in ASIDE
                found.setdefault(Part(f"{program.name}: {kind}", serves, kind not in NOT_BACK), []).append(pid)
        return found

    def is_whole(self) -> bool:
        """Whether all that should run does, and a proven draft serves."""
        state = read_state(self.home)
        if state is None or not state.ready:
            return False
        try:
            told = self.status()
        except httpx.HTTPError:
            return False
        return bool(told["speculating"] and told["proof"] is not None)

    def good_drafts(self) -> list[int]:
        """Return the drafts that may be promoted, at least two."""
        versions = self.registry.versions("draft")
        found = [one.number for one in versions if is_usable(one) and one.number not in self.spoiled]
        return found if len(found) > 1 else [*found, self.register(noisy(0.02, seed=len(versions)))]

    def register(self, change: Spoil, golden_tau: float | None = None, spoiled: bool = False) -> int:
        """Register the first draft with a change, and an honest promise unless another is given."""
        number = register_changed(self.home, change, golden_tau)
        if spoiled:
            self.spoiled.add(number)
        return number

    def learned(self) -> frozenset[int]:
        """Return the drafts that a refresh trained and the gate passed."""
        versions = self.registry.versions("draft")
        return frozenset(v.number for v in versions if v.lineage.window is not None and v.lineage.gate == "passed")

    def lines(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """Return the windows of each draft and of those that it goes on from."""
        versions = {one.number: one for one in self.registry.versions("draft")}

        def windows(one: Version | None) -> Iterator[tuple[int, int]]:
            while one is not None:
                if (seen := one.lineage.window) is not None:
                    yield seen.first_seq, seen.last_seq
                one = versions.get(one.lineage.continues or one.lineage.parent or 0)

        return tuple(tuple(windows(one)) for one in versions.values())

    def logged(self) -> tuple[dict[str, str], int]:
        """Return consent by id of request, and how many rows the log counts as lost."""
        with closing(QueryLog(self.home / "queries.db")) as log:
            found = [(row.id, row.consent) for row in log.latest(10**9)]
            return {seen[0]: consent for name, consent in found if (seen := ROW_ID.search(name))}, log.stats().dropped

    def planted(self, golden: list[Golden]) -> tuple[str, ...]:
        """Return where in the home something lies that may not: what was asked by those who did not let it be logged.

        `golden` is an answer to each of them, for the token ids of what it was asked.
        """
        needles = [(mark, form) for log, mark in MARKS.items() if log != "full" for form in _forms(mark, golden)]
        found: set[str] = set()
        for file in (path for path in self.home.rglob("*") if path.is_file()):
            content = file.read_bytes()
            found |= {f"{mark} in {file.relative_to(self.home)}" for mark, form in needles if form in content}
        return tuple(sorted(found))

    def _is_down(self) -> bool:
        free = port_is_free("127.0.0.1", self._port)
        return free and read_state(self.home) is None and not is_served(self.home)

    def _watch(self) -> None:
        while not self._ended.wait(0.5):
            with suppress(httpx.HTTPError):
                told = self.status()
                phase, draft, proven = str(told["phase"]), told["draft_version"], told["proof"] is not None
                self.looks.append(Look(at_s=time.monotonic(), phase=phase, draft=draft, proven=proven))


def _questions(log: str, numbers: range) -> tuple[str, ...]:
    return tuple(QUESTION.format(mark=MARKS[log], number=number) for number in numbers)


def _family(guard: int) -> Iterator[tuple[str, int]]:
    """Yield kind and id of a program's processes."""
    with suppress(psutil.NoSuchProcess):
        yield "guard", psutil.Process(guard).pid
        for process in psutil.Process(guard).children(recursive=True):
            with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
                told = " ".join(process.cmdline())
                yield next((name for mark, name in NAMES if mark in told), "other"), process.pid


def _forms(mark: str, golden: list[Golden]) -> list[bytes]:
    """Return a mark as text, and as the token ids of who was asked it, in text and in binary."""
    forms, runs = [mark.encode(), mark.encode("utf-16-le")], {*_runs(mark, golden)}
    if not runs:
        raise ValueError(f"no prompt holds the tokens of {mark}: there is nothing to look for")
    for ids in runs:
        forms += [text.join(map(str, ids)).encode() for text in (", ", ",")]
        forms += [struct.pack(f"<{len(ids)}{kind}", *ids) for kind in "iq"]
    return forms


def _runs(mark: str, golden: list[Golden]) -> Iterator[tuple[int, ...]]:
    """Return the token ids of a mark: the tiny target's tokens are bytes, all moved by the same number."""
    steps = [b - a for a, b in pairwise(mark.encode())]
    for one in golden:
        ids = one.prompt_ids
        for start in range(len(ids) - len(steps)):
            run = ids[start : start + len(mark)]
            if [b - a for a, b in pairwise(run)] == steps:
                yield tuple(run)
