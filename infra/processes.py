"""Child processes that never outlive their parent, not even a parent that was killed with -9.

Between the parent and the program stands a guard: this file, run as a script. It holds the parent's end of a pipe on
its standard input; when that closes, however the parent ended, it stops the program and everything in the program's
process group. Should the guard itself be killed, the kernel kills the program (PR_SET_PDEATHSIG). A death signal alone
would not do: it follows the thread that started the child, and it does not reach grandchildren. Linux only.
"""

import contextlib
import ctypes
import errno
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

PR_SET_PDEATHSIG = 1
ORPHAN_GRACE_S, POLL_S = 5.0, 0.05


class Child:
    """A running program in a session of its own, with its output in a log file that other users can't read."""

    def __init__(self, name: str, guard: subprocess.Popen[bytes], log_path: Path) -> None:
        self.name = name
        self.log_path = log_path
        self._guard = guard

    @classmethod
    def start(cls, argv: Sequence[str], env: Mapping[str, str] | None, log_path: Path, name: str) -> Self:
        """Start a program, with variables added to this process's own; ValueError if there is none of that name."""
        if shutil.which(argv[0]) is None:
            raise ValueError(f"{name}: there is no program {argv[0]!r}")
        log_path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with os.fdopen(os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab") as log:
            guard = subprocess.Popen(
                [sys.executable, "-I", "-S", __file__, *argv],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(env or {})},
                start_new_session=True,
                umask=0o077,
            )
        return cls(name, guard, log_path)

    @property
    def pid(self) -> int:
        """The guard's process id."""
        return self._guard.pid

    def poll(self) -> int | None:
        """Return None while the program runs, else its exit code; 128 + n if signal n ended it, as in a shell."""
        code = self._guard.poll()
        return code if code is None or code >= 0 else 128 - code

    def tail(self, num_lines: int = 20) -> str:
        from infra.files import last_lines  # not at the top: the guard runs this file without the others

        return "\n".join(last_lines(self.log_path, num_lines))

    def stop(self, grace_s: float = 10.0) -> int:
        """Send SIGTERM to the program's group, SIGKILL after `grace_s` seconds, and return the exit code."""
        self._guard.terminate()
        try:
            self._guard.wait(grace_s)
        except subprocess.TimeoutExpired:
            self._guard.send_signal(signal.SIGUSR1)
        code = self._guard.wait()
        if self._guard.stdin is not None:
            self._guard.stdin.close()
        return code if code >= 0 else 128 - code

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()


def wait_until(check: Callable[[], bool], timeout_s: float, child: Child | None, what: str) -> None:
    """Wait until `check`, which is asked every 50 ms, returns True; `child` is the process that brings it about.

    RuntimeError if the child ended first, TimeoutError if the time is up; the message ends with the tail of its log.
    """
    deadline = time.monotonic() + timeout_s
    while not check():
        if child is not None and (code := child.poll()) is not None:
            raise RuntimeError(f"{child.name} ended with {code}, waiting for {what}\n{child.tail()}")
        if time.monotonic() > deadline:
            tail = f"\n{child.tail()}" if child is not None else ""
            raise TimeoutError(f"waited {timeout_s} s for {what}{tail}")
        time.sleep(POLL_S)


def answers(url: str, timeout_s: float = 2.0) -> bool:
    """Return whether a GET of `url` is answered with a 2xx status: a check for `wait_until`."""
    try:
        with urllib.request.urlopen(url, timeout=timeout_s) as response:
            return bool(200 <= response.status < 300)
    except OSError:  # refused, reset, timed out, or an HTTP error status
        return False


def free_port(host: str = "127.0.0.1") -> int:
    """Return a TCP port of `host` that nothing listens on now; another process may take it at any time."""
    with socket.socket() as tried:
        tried.bind((host, 0))
        return int(tried.getsockname()[1])


def hold_port(host: str, port: int) -> socket.socket:
    """Bind a port for a server that starts later, and return what holds it until it is closed.

    Meanwhile only a process of this user that sets SO_REUSEPORT, as HAProxy and Ray's proxy do, can listen there.
    ValueError if something listens on the port, or nothing can.
    """
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do: a closing connection is no user
    try:
        held.bind((host, port))
    except OSError as error:
        held.close()
        what = f"port {port} of {host} is in use" if error.errno == errno.EADDRINUSE else f"{host} can't be bound"
        raise ValueError(f"{what}: {error.strerror}") from error
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)  # else any server could bind it beside this one
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    return held


def require_port_free(host: str, port: int) -> None:
    """Raise ValueError if something listens on the port, or nothing can, before a service is started that fails."""
    hold_port(host, port).close()


def port_is_free(host: str, port: int) -> bool:
    try:
        require_port_free(host, port)
    except ValueError:
        return False
    return True


def _guard(argv: list[str]) -> int:
    """Run `argv` in a session of its own until it ends, standard input closes, or a signal says so."""
    guard_pid = os.getpid()
    libc = ctypes.CDLL(None, use_errno=True)

    def die_with_guard() -> None:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != guard_pid:  # the guard died before the call
            os._exit(1)

    program = subprocess.Popen(
        argv,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=die_with_guard,  # noqa: PLW1509 - the guard has one thread
    )
    signal.signal(signal.SIGTERM, lambda *_: _signal_group(program.pid, signal.SIGTERM))
    signal.signal(signal.SIGINT, lambda *_: _signal_group(program.pid, signal.SIGINT))
    signal.signal(signal.SIGUSR1, lambda *_: _signal_group(program.pid, signal.SIGKILL))
    ended = os.pidfd_open(program.pid)
    ready, _, _ = select.select([ended, sys.stdin.fileno()], [], [])
    if ended not in ready:
        _signal_group(program.pid, signal.SIGTERM)
        select.select([ended], [], [], ORPHAN_GRACE_S)
    # The program is not reaped yet, so its group's id cannot have gone to another process.
    _signal_group(program.pid, signal.SIGKILL)
    code = program.wait()
    return code if code >= 0 else 128 - code


def _signal_group(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, number)


if __name__ == "__main__":
    sys.exit(_guard(sys.argv[1:]))
