"""An interrupt or a kill while an engine starts ends it, and what it started."""

import copy
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

import psutil
import pytest

from models.engines.vllm.fields import WithParent
from models.engines.vllm.launch import interruptible
from tests.infra.rows import run_python

STARTS = """
import asyncio, signal, sys
from pathlib import Path
from models.engines.vllm import Params
from tasks.generate_answers import open_engine

def interrupt(*_):
    raise KeyboardInterrupt

async def start():
    async with open_engine(Path(sys.argv[1]), Params(num_draft_tokens=0, max_model_len=64)):
        print("started", flush=True)

if __name__ == "__main__":
    signal.signal(signal.SIGTERM, interrupt)
    asyncio.run(start())
"""

ARRIVES = """
import ctypes, os, sys
from models.engines.vllm.fields import _arrive

def told():
    signal = ctypes.c_int()
    ctypes.CDLL(None).prctl(2, ctypes.byref(signal))  # PR_GET_PDEATHSIG
    return signal.value

_arrive(1)
print(told())
_arrive(os.getppid())
print(told(), flush=True)
_arrive(int(sys.argv[1]))
print("alive")
"""


def interrupt(*_: object) -> NoReturn:
    raise KeyboardInterrupt


def engines(parent: psutil.Process) -> list[psutil.Process]:
    """Return the processes that vLLM waits for, which are named by what they run at first."""
    found = []
    for child in parent.children():
        with suppress(psutil.Error):  # others come and go
            if "EngineCore" in child.name() or any("spawn_main" in word for word in child.cmdline()):
                found.append(child)
    return found


@pytest.fixture
def handled() -> Iterator[None]:
    former = signal.signal(signal.SIGTERM, interrupt)
    yield
    signal.signal(signal.SIGTERM, former)


@contextmanager
def swallowing() -> Iterator[None]:
    with suppress(KeyboardInterrupt):
        yield


@pytest.mark.usefixtures("handled")
def test_an_interrupt_gets_through_what_would_swallow_it() -> None:
    with swallowing():
        os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), interruptible(), swallowing():
        os.kill(os.getpid(), signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is interrupt


@pytest.mark.usefixtures("handled")
def test_a_block_that_ends_by_itself_leaves_handlers_as_they_were_in_any_thread() -> None:
    def run() -> None:
        with interruptible():
            found.append(signal.getsignal(signal.SIGTERM))

    found: list[object] = []
    run()
    other = threading.Thread(target=run)
    other.start()
    other.join()
    assert found[0] is not interrupt and found[1] is interrupt
    assert signal.getsignal(signal.SIGTERM) is interrupt


@contextmanager
def starting(target: Path, folder: Path) -> Iterator[tuple[subprocess.Popen[bytes], list[psutil.Process]]]:
    """A process that starts an engine, as soon as it has started the engine's."""
    script = folder / "starts.py"
    script.write_text(STARTS)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with (folder / "log").open("w+") as log:
        parent = subprocess.Popen([sys.executable, script, target], env=environment, stdout=log, stderr=log)
        started: list[psutil.Process] = []
        while not started:
            assert parent.poll() is None, (folder / "log").read_text()
            started = engines(psutil.Process(parent.pid))
            time.sleep(0.1)
        time.sleep(1)
        yield parent, started
    assert "started" not in (folder / "log").read_text()


@pytest.mark.engine
def test_a_terminated_start_of_an_engine_ends_soon_and_leaves_nothing_running(
    tiny_target: Path, tmp_path: Path
) -> None:
    with starting(tiny_target, tmp_path) as (parent, started):
        parent.terminate()
        assert parent.wait(60) != 0
    psutil.wait_procs(started, timeout=60)
    assert not any(child.is_running() for child in started)


@pytest.mark.engine
def test_an_engine_whose_parent_is_killed_while_it_starts_ends_soon_too(tiny_target: Path, tmp_path: Path) -> None:
    with starting(tiny_target, tmp_path) as (parent, started):
        parent.kill()
        parent.wait()
    # It reads vLLM first, which takes seconds; without a guard it waits five minutes for its parent.
    psutil.wait_procs(started, timeout=90)
    assert not any(child.is_running() for child in started)


def test_the_process_that_sends_the_guard_is_left_alone_and_copies_stay_where_they_are() -> None:
    guard = WithParent()
    assert copy.deepcopy(guard) is guard
    assert isinstance(pickle.loads(pickle.dumps(guard)), WithParent)  # noqa: S301 - which is what arrives by pickle


def test_who_gets_the_guard_ends_with_its_parent_at_once_if_that_is_gone_and_not_with_a_stranger() -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    arrived = run_python(ARRIVES, gone.pid)
    assert (arrived.stdout, arrived.returncode) == ("0\n9\n", -signal.SIGKILL)
