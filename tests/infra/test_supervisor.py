"""The supervisor as a process of its own, over real programs."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from infra.machine import process_identity
from infra.processes import answers, free_port, wait_until
from infra.supervisor import STATE, ProcessRecord, UpState, read_state
from tests.infra.rows import environment

LOG = "supervisor.log"
SCRIPT = """
import sys
from pathlib import Path
from infra import supervisor
from infra.supervisor import Program, Supervisor
supervisor.POLL_S = 0.05
home, *programs = sys.argv[1:]
sys.exit(Supervisor([eval(program) for program in programs], Path(home), "tiny").run())
"""
Start = Callable[..., "subprocess.Popen[bytes]"]


def server(port: int, name: str = "web", delay_s: float = 0.0, argv: list[str] | None = None) -> str:
    serve = f"exec {sys.executable} -m http.server {port} --bind 127.0.0.1"
    argv, url = argv or ["sh", "-c", f"sleep {delay_s}; {serve}"], f"http://127.0.0.1:{port}"
    return f"Program({name!r}, {argv!r}, url={url!r}, health={url!r}, start_timeout_s=60, first_pause_s=0.1)"


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Return what starts a supervisor in `tmp_path`; it is ended after the test."""
    processes: list[subprocess.Popen[bytes]] = []

    def run(*programs: str) -> "subprocess.Popen[bytes]":
        argv = [sys.executable, "-c", SCRIPT, str(tmp_path), *programs]
        with (tmp_path / LOG).open("wb") as told:
            processes.append(subprocess.Popen(argv, env=environment(), stderr=told))
        return processes[-1]

    yield run
    for process in processes:
        process.terminate()
        process.wait(20)


def wait_ready(home: Path) -> UpState:
    wait_until(lambda: (state := read_state(home)) is not None and state.ready, 60, None, "readiness")
    state = read_state(home)
    assert state is not None
    return state


def kill_first(home: Path) -> ProcessRecord:
    """Kill the first program once all are ready, and return how it stood."""
    program = wait_ready(home).programs[0]
    assert program.pid is not None
    os.kill(program.pid, signal.SIGKILL)
    return program


def wait_restarted(home: Path) -> None:
    def again() -> bool:
        state = read_state(home)
        return state is not None and state.ready and state.programs[0].restarts > 0

    wait_until(again, 60, None, "the second start")
    assert wait_ready(home).programs[0].restarts == 1


@pytest.mark.slow
def test_a_program_waits_for_those_that_it_comes_after_and_for_no_others(start: Start, tmp_path: Path) -> None:
    late, next_door = server(free_port(), "late", delay_s=2.0), server(free_port(), "next door")
    start(late, next_door, "Program('last', ['sleep', '60'], after=('late', 'next door'))")

    def ready() -> set[str]:
        state = read_state(tmp_path)
        return {program.name for program in state.programs if program.ready} if state is not None else set()

    wait_until(lambda: ready() != set(), 60, None, "the first")
    assert ready() == {"next door"}
    assert [program.pid is None for program in read_state(tmp_path).programs] == [False, False, True]
    assert all(program.ready and program.pid for program in wait_ready(tmp_path).programs)


@pytest.mark.slow
def test_programs_come_up_and_end_with_it(start: Start, tmp_path: Path) -> None:
    port = free_port()
    process = start(server(port), IDLE)
    state = wait_ready(tmp_path)
    assert [program.name for program in state.programs] == ["web", "idle"]
    assert answers(state.url("web"))
    pids = [program.pid for program in state.programs if program.pid]
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 0
    assert len(pids) == 2
    assert all(process_identity(pid) is None for pid in pids)
    assert not (tmp_path / STATE).exists()


IDLE = "Program('idle', ['sleep', '60'])"


@pytest.mark.slow
def test_with_no_room_for_its_state_it_says_so_once_and_goes_on_and_the_state_follows(start, tmp_path) -> None:
    process = start(IDLE)
    wait_ready(tmp_path)
    in_the_way = tmp_path / f".{STATE}.{process.pid}"
    in_the_way.mkdir()
    before = kill_first(tmp_path)
    told = "can't be written and is behind"
    wait_until(lambda: told in (tmp_path / LOG).read_text(), 60, None, "a word of it")
    time.sleep(0.5)  # the program starts again, and the state is tried again and again
    assert (process.poll(), read_state(tmp_path).programs[0]) == (None, before)
    assert (tmp_path / LOG).read_text().count(told) == 1
    in_the_way.rmdir()

    def caught_up() -> bool:
        [now] = read_state(tmp_path).programs
        return now.restarts == 1 and now.pid is not None and process_identity(now.pid) is not None

    wait_until(caught_up, 60, None, "the state that is true again")


@pytest.mark.slow
def test_a_program_that_can_not_be_started_again_now_is_tried_again_later(start: Start, tmp_path: Path) -> None:
    process = start(IDLE)
    log = Path(wait_ready(tmp_path).programs[0].log)
    log.unlink()
    log.mkdir()
    kill_first(tmp_path)
    wait_until(lambda: "idle could not be started" in (tmp_path / LOG).read_text(), 60, None, "a word of it")
    log.rmdir()
    wait_until(lambda: (now := read_state(tmp_path).programs[0]).ready and now.pid is not None, 60, None, "it runs")
    assert process.poll() is None


@pytest.mark.slow
def test_it_is_started_again_once_what_is_left_of_it_lets_its_port_go(start: Start, tmp_path: Path) -> None:
    port = free_port()
    script = (
        "import http.server, os, time\n"
        f"served = http.server.HTTPServer(('127.0.0.1', {port}), http.server.SimpleHTTPRequestHandler)\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    time.sleep(4)\n"
        "    os._exit(0)\n"
        "served.serve_forever()\n"
    )
    start(server(port, argv=[sys.executable, "-c", script]))
    program = kill_first(tmp_path)
    wait_restarted(tmp_path)
    assert "in use" not in Path(program.log).read_text()
    assert answers(f"http://127.0.0.1:{port}")


@pytest.mark.slow
def test_a_program_that_does_not_start_ends_it_all_and_says_why(start: Start, tmp_path: Path) -> None:
    process = start(IDLE, "Program('bad', ['sh', '-c', 'echo no disk; exit 3'], health='http://127.0.0.1:9')")
    assert process.wait(60) == 1
    state = UpState.model_validate_json((tmp_path / STATE).read_bytes())
    assert "bad ended with 3" in state.failure
    assert "no disk" in state.failure
    assert read_state(tmp_path) is None


def test_a_killed_supervisor_takes_its_programs_along_and_counts_as_down(start: Start, tmp_path: Path) -> None:
    process = start(IDLE)
    pid = wait_ready(tmp_path).programs[0].pid
    assert pid is not None
    process.kill()
    process.wait(60)
    wait_until(lambda: process_identity(pid) is None, 60, None, "the program's end")
    assert read_state(tmp_path) is None


def test_what_a_program_said_last_stands_beside_the_word_that_it_is_started_again(start: Start, tmp_path: Path) -> None:
    start(f"Program('refuses', {['sh', '-c', 'echo the server has no plugin; exit 2']!r})")
    told = tmp_path / LOG
    wait_until(lambda: told.is_file() and b"restarting" in told.read_bytes(), 60, None, "the restart")
    assert "refuses ended with 2 (the server has no plugin)" in told.read_text()
