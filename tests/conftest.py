"""What tests share: a two-layer target and a draft for it, made once, and one engine for the whole session.

Where pytest runs as several workers, each keeps to a core of its own, and so do the engines and services that it
starts: two engines of two threads each, which wait for each other, are far slower than two of one.
"""

import asyncio
import gc
import os
import shutil
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import settings
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

from infra.machine import openmp_preload
from models.engines.vllm import child_environment
from tests.forked import fork_engines

settings.register_profile("quick", max_examples=50, derandomize=True, database=None, deadline=None)
settings.register_profile("thorough", max_examples=2000, database=None, deadline=None)
settings.load_profile("quick")  # another: pytest --hypothesis-profile=thorough

if TYPE_CHECKING:
    import torch

    from tasks.gate_draft import GateResult
    from tests.object_store import Bucket

if _WORKER := os.environ.get("PYTEST_XDIST_WORKER", "").removeprefix("gw"):
    _CORES = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {_CORES[int(_WORKER) % len(_CORES)]})
# Tests that share what takes a minute to build or to start: one worker gets all of a group.
DEAR = (
    ("tests/flows/",),
    ("tests/services/",),
    tuple(f"tests/drills/test_{name}.py" for name in ("pipeline", "post_promotion", "up", "windows")),
)
ALONE = ("tests/flows/test_full_chain.py",)  # builds another recipe
LONG = (
    "tests/flows/",
    "tests/services/",
    *("tests/tasks/stages/test_compiling.py", "tests/tasks/measure/test_stock.py"),
    *(f"tests/models/engines/test_vllm{name}.py" for name in ("_families", "", "_planned_families", "_quantized")),
    *(f"tests/models/engines/test_vllm_{name}.py" for name in ("published", "unplanned", "interrupts")),
)
# vLLM starts its own processes, which must inherit what its CPU engine needs.
_ENGINE_ENVIRONMENT = child_environment() | openmp_preload()
# Serve's controller looks as often as by default; ours looks seldom, which each start and end of a service waits for.
_ENGINE_ENVIRONMENT["RAY_SERVE_CONTROL_LOOP_INTERVAL_S"] = "0.1"
# Workers of Ray that train give way to a service; a test of theirs would wait on a busy core for minutes.
_ENGINE_ENVIRONMENT["RAY_worker_niceness"] = "0"
# What is compiled of our own kernels is the same for all homes of tests; otherwise each has its own.
_ENGINE_ENVIRONMENT["TORCH_EXTENSIONS_DIR"] = str(Path.home() / ".cache" / "torch_extensions")
# Where the browser, its pictures and a Postgres are is the tests' business; settings refuse names that they don't know.
_BROWSER, _SCREENSHOTS, TEST_POSTGRES = (
    os.environ.pop(f"REDRAFT_{name}", "") for name in ("CHROMIUM", "SCREENSHOTS", "TEST_POSTGRES")
)
# What is special in an address, a command line or a configuration, and may be in the name of a folder.
ODD_NAME = 'a home?#% %41 of "Zoë\'s" & so on'
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


gc.disable()  # of what tests import nothing is garbage, and to look for it takes a quarter of the time


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave files of engine tests unread where none is wanted, as importing vLLM takes longer than most tests, and
    files of other tests where only those of engines are.
    """
    marked, path = config.getoption("markexpr"), collection_path
    if "not engine" in marked and path.suffix == ".py":
        return "\npytestmark = pytest.mark.engine\n" in path.read_text() or None
    if marked == "engine" and path.match("test_*.py"):
        return "pytest.mark.engine" not in path.read_text() or None
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let workers begin with what takes longest, and then with files of many tests, so that they end together."""
    if _WORKER:
        files = [item.nodeid.partition("::")[0] for item in items]
        num_tests = Counter(files)
        ranks = {file: (not file.startswith(LONG), -num_tests[file], file) for file in num_tests}
        items.sort(key=lambda item: ranks[item.nodeid.partition("::")[0]])


def pytest_collection_finish() -> None:
    """Look for garbage from now on, but not among what was imported."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadScopeScheduling | None:
    """Keep together what shares an engine, a service or a build, where pytest was called with `--dist loadscope`."""
    return _BySharing(config, log) if config.getoption("dist") == "loadscope" else None


class _BySharing(LoadScopeScheduling):
    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return file if file in ALONE else next((group[0] for group in DEAR if file.startswith(group)), file)


@pytest.fixture(scope="session", autouse=True)
def _engine_environment() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in _ENGINE_ENVIRONMENT.items():
            patch.setenv(name, value)
        yield


@pytest.fixture(scope="session", autouse=True)
def _forked_engines() -> None:
    """Save each start of an engine, in sessions that have any, what importing takes."""
    if "vllm" in sys.modules:
        fork_engines()


@pytest.fixture
def own_environment() -> Iterator[None]:
    """Keep what a command of `redraft` puts into the environment, such as a home's secrets, from other tests."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A two-layer Llama with random weights."""
    from models.targets import random

    directory = tmp_path_factory.mktemp("target")
    random.build(random.Params(), directory)
    return directory


@pytest.fixture(scope="session")
def tiny_draft(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained EAGLE-3 head of 64 tokens for it."""
    return make_draft(tiny_target, tmp_path_factory.mktemp("draft"), seed=0)


def make_draft(target: Path, directory: Path, seed: int, vocab_size: int = 64) -> Path:
    """Save a head with seeded noise on its weights, so that two seeds draft differently."""
    from infra.artifacts import write_manifest
    from models.drafts import eagle3

    counts = np.zeros(259)
    counts[3 : 3 + vocab_size] = 1
    head = eagle3.create(eagle3.Params(vocab_size=vocab_size), target, counts)
    shake(head, 0.02, seed)
    eagle3.save(head, directory)
    write_manifest(directory)
    return directory


def shake(draft: "torch.nn.Module", scale: float, seed: int) -> None:
    """Add seeded noise to a draft's weights."""
    import torch

    rng = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter += scale * torch.randn(parameter.shape, generator=rng)


def judge(
    gains: dict[str, float], challenger: int = 1, left_out: tuple[str, ...] = (), learns: bool = True
) -> "GateResult":
    """Let the gate judge a challenger on made-up scores of 120 conversations a domain.

    Args:
        gains: domain to the tokens a step by which the challenger's τ differs; the champion's is 1.5.
        challenger: which one of its champion it is.
        left_out: domains without a conversation to judge.
        learns: whether it may go on learning.
    """
    from models.core.evaluation.gate import Evidence, decide
    from models.core.evaluation.paired import Score
    from models.types import GateParams
    from tasks.gate_draft import GateResult, score_floors, with_tau
    from tasks.measure_draft import summarise

    def scores(added: dict[str, float]) -> list[Score]:
        return [
            Score(id=f"{domain}{number}", domain=domain, steps=20, accepted=20 * (0.4 + 0.02 * (number % 11) + gain))
            for domain, gain in added.items()
            for number in range(120)
        ]

    params = GateParams(num_resamples=200)
    before, after = scores(dict.fromkeys(gains, 0.0)), scores(gains)
    floors = score_floors(dict.fromkeys(gains, before), after, params, seed=0)
    evidence = Evidence.start(2, challenger).after(before, after)
    champion, measured = summarise(before, 1.0, seed=0), summarise(after, golden_tau=1.5, seed=0)
    report = with_tau(decide(evidence, floors, params, learns), champion, measured, left_out)
    return GateResult(report=report, evidence=evidence, measured=measured)


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty registry's database. Its tables take seconds to make; a copy of it is a fresh registry."""
    from infra.database import Database
    from infra.registry import Registry

    home = tmp_path_factory.mktemp("store")
    Registry(f"sqlite:///{home}/mlflow.db", home / "artifacts", Database(home / "queries.db")).versions("draft")
    return home / "mlflow.db"


@pytest.fixture(scope="session")
def object_store(tmp_path_factory: pytest.TempPathFactory) -> Iterator["Bucket"]:
    """An empty bucket of an object store of the session's own; without moto the test is skipped."""
    pytest.importorskip("moto", reason="moto[server], of extra `test`, is not installed")
    from tests.object_store import Bucket

    with Bucket.started(tmp_path_factory.mktemp("moto") / "log") as bucket:
        yield bucket


@pytest.fixture
def bucket(object_store: "Bucket", monkeypatch: pytest.MonkeyPatch) -> "Bucket":
    """The same, with the variables that lead to it, and nothing in it."""
    for name, value in object_store.variables.items():
        monkeypatch.setenv(name, value)
    object_store.empty()
    return object_store


@pytest.fixture(scope="session")
def browser() -> str:
    """A Chromium to open pages in; without one the test is skipped."""
    found = _BROWSER or next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        pytest.skip(f"no browser: none of {', '.join(BROWSERS)} is installed, and REDRAFT_CHROMIUM names none")
    return found


@pytest.fixture(scope="session")
def screenshots(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder for pictures of pages: REDRAFT_SCREENSHOTS, or one that pytest clears away."""
    folder = Path(_SCREENSHOTS).absolute() if _SCREENSHOTS else tmp_path_factory.mktemp("screenshots")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    """The event loop that the session's engine lives in."""
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


@pytest.fixture(scope="session")
def engine(tiny_target: Path, tiny_draft: Path, loop: asyncio.AbstractEventLoop) -> Iterator["object"]:
    """One engine for the session; a test that changes it puts it back."""
    from models.engines.vllm import Params
    from models.engines.vllm.engine import VllmEngine

    # Blocks of the prefix cache that prompts of a test fill; the default is 128 tokens.
    params = Params(num_draft_tokens=3, max_model_len=256, max_num_seqs=64, extra={"block_size": 32})
    engine = loop.run_until_complete(VllmEngine.start(tiny_target, tiny_draft, params, draft_version="1"))
    yield engine
    loop.run_until_complete(engine.close())
