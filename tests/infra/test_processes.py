import os
import signal
import socket
import sys
from pathlib import Path

import pytest

from infra.machine import process_identity
from infra.processes import Child, answers, free_port, hold_port, port_is_free, require_port_free, wait_until
from tests.infra.rows import running_python

# A program with a child of its own; both print their process ids.
FAMILY = "sleep 60 & echo pid $!; echo pid $$; wait"
PARENT = """
import sys, time
from pathlib import Path
from infra.processes import Child
print(Child.start(["sh", "-c", sys.argv[1]], {}, Path(sys.argv[2]), "x").pid, flush=True)
time.sleep(60)
"""


def family(log: Path) -> list[int]:
    wait_until(lambda: log.exists() and log.read_text().count("pid") == 2, 60, None, "two process ids")
    return [int(line.split()[1]) for line in log.read_text().splitlines()]


def all_gone(pids: list[int]) -> bool:
    return all(process_identity(pid) is None for pid in pids)


def test_stopping_a_child_ends_its_whole_group(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with Child.start(["sh", "-c", FAMILY], {}, log, "family") as child:
        pids = family(log)
        assert child.poll() is None
    assert child.poll() == 128 + signal.SIGTERM
    wait_until(lambda: all_gone(pids), 60, None, "the group's end")


def test_a_child_that_ignores_sigterm_is_killed_after_the_grace_time(tmp_path: Path) -> None:
    stubborn = "trap '' TERM; echo ready; for n in $(seq 600); do sleep 0.1; done; exit 3"
    child = Child.start(["sh", "-c", stubborn], {}, tmp_path / "log", "x")
    wait_until(lambda: "ready" in child.tail(), 60, child, "readiness")
    assert child.stop(grace_s=0.2) == 128 + signal.SIGKILL  # of itself it would end with 3


@pytest.mark.slow
def test_a_killed_parent_leaves_nothing_running(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with running_python(PARENT, FAMILY, log) as (parent, guard):
        pids = [int(guard), *family(log)]
        parent.kill()
        wait_until(lambda: all_gone(pids), 60, None, "everybody's end")


@pytest.mark.slow
def test_a_killed_guard_leaves_nothing_running(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with running_python(PARENT, "echo pid $$; sleep 60", log) as (_, guard):
        wait_until(lambda: log.exists() and "pid" in log.read_text(), 60, None, "the process id")
        os.kill(int(guard), signal.SIGKILL)
        wait_until(lambda: all_gone([int(log.read_text().split()[1])]), 60, None, "everybody's end")


def test_a_child_that_ends_while_it_is_waited_for_is_reported_with_its_log(tmp_path: Path) -> None:
    child = Child.start(["sh", "-c", "echo $REASON; exit 3"], {"REASON": "no memory"}, tmp_path / "log", "engine")
    with pytest.raises(RuntimeError, match=r"engine ended with 3, waiting for readiness\nno memory"):
        wait_until(lambda: False, 60, child, "readiness")
    assert child.stop() == 3


def test_waiting_ends_when_the_time_is_up() -> None:
    with pytest.raises(TimeoutError, match=r"waited 0\.1 s for nothing"):
        wait_until(lambda: False, 0.1, None, "nothing")


def test_what_a_child_writes_is_closed_to_other_users(tmp_path: Path) -> None:
    with Child.start(["sh", "-c", f"echo text > {tmp_path}/written; sleep 60"], {}, tmp_path / "log", "x") as child:
        wait_until((tmp_path / "written").exists, 60, child, "the file")
    assert [(tmp_path / name).stat().st_mode & 0o777 for name in ("written", "log")] == [0o600, 0o600]


def test_a_program_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is no program 'no-such-program'"):
        Child.start(["no-such-program"], {}, tmp_path / "log", "x")


def test_a_port_in_use_is_refused_and_a_free_one_is_not() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        with pytest.raises(ValueError, match=f"port {port} of 127.0.0.1 is in use"):
            require_port_free("127.0.0.1", port)
        assert not port_is_free("127.0.0.1", port)
    require_port_free("127.0.0.1", free_port())
    assert port_is_free("127.0.0.1", free_port())


def test_a_port_that_is_held_goes_to_a_proxy_that_shares_it_and_to_nobody_else() -> None:
    with hold_port("127.0.0.1", port := free_port()), socket.socket() as proxy:
        for option in ((), (socket.SO_REUSEADDR,)):
            with socket.socket() as stranger, pytest.raises(OSError, match="in use"):
                for name in option:
                    stranger.setsockopt(socket.SOL_SOCKET, name, 1)
                stranger.bind(("127.0.0.1", port))
        assert not port_is_free("127.0.0.1", port)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port))
        for name in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
            proxy.setsockopt(socket.SOL_SOCKET, name, 1)
        proxy.bind(("127.0.0.1", port))
        proxy.listen()
        socket.create_connection(("127.0.0.1", port)).close()
    assert port_is_free("127.0.0.1", port)


def test_a_server_answers_once_it_is_up(tmp_path: Path) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}/"
    assert not answers(url)
    argv = [sys.executable, "-m", "http.server", str(port), "--bind", "127.0.0.1", "--directory", str(tmp_path)]
    with Child.start(argv, {}, tmp_path / "log", "server") as child:
        wait_until(lambda: answers(url), 60, child, url)
        assert not answers(url + "absent")
