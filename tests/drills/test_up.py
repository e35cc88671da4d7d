"""`redraft up`, all real: a refresh by itself, a person rolls back, what is killed comes back, nothing is left.

F29: memory runs short while the refresh trains. F38: strangers on the machine and foreign pages ask all that listens.
"""

import itertools
import os
import shutil
import signal
import socket
import sqlite3
import stat
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from functools import partial
from pathlib import Path

import grpc
import httpx
import psutil
import pytest

from infra.auth_middleware import pages_login
from infra.environment import environment_of
from infra.home import home_secret
from infra.machine import process_identity
from infra.overview import overview
from infra.processes import wait_until
from infra.service_process import MLFLOW, PREFECT
from infra.settings import Settings, load_settings
from infra.supervisor import ProcessRecord, read_state
from infra.trigger_store import TriggerStore
from tests.drills.machine import Memory, seen_with
from tests.flows.conftest import ENDS_S, Cli

pytestmark = pytest.mark.engine
CLIENTS_KEY = "the-key-of-a-client"
ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "models" / "recipes" / "tiny.toml"
FOREIGN = {"Host": "evil.example", "Origin": "http://evil.example"}
PATHS = ("/", "/api/jobs/", "/v1/models", "/redraft/status")
# Prefect's page without what it shows, and Ray's own counters, which it publishes on loopback (SECURITY.md).
HARMLESS = ("<!DOCTYPE html>", "# HELP ray_", "# HELP autoscaler_")
# What lists a cluster's nodes, reads its store, and gets code to run.
RAY_CALLS = (
    "/ray.rpc.NodeInfoGcsService/GetAllNodeInfo",
    "/ray.rpc.InternalKVGcsService/InternalKVKeys",
    "/ray.rpc.NodeManagerService/RequestWorkerLease",
)


@pytest.mark.timeout(900)
def test_a_refresh_happens_by_itself_and_a_person_has_the_last_word(built: tuple[Cli, str], tmp_path: Path) -> None:
    home = tmp_path / "home"
    shutil.copytree(built[0].home, home)
    (machine := tmp_path / "machine").mkdir()
    memory = Memory(machine / "meminfo")
    cli = Cli(home, REDRAFT_API_KEYS=CLIENTS_KEY, **seen_with(machine, memory))
    recipe = tmp_path / "online.toml"
    schedule = "\n[schedule]\nrefresh_interval_s = 20\nretry_s = 1.0\n"
    recipe.write_text('name = "tiny"\n' + RECIPE.read_text() + schedule)

    def draft() -> int | None:
        """Return what is served, without the seconds that a command takes to start."""
        seen = overview(settings).service
        return None if seen is None else seen.draft_version

    settings = load_settings(environment_of(home))
    (home / "queries.db").touch(mode=0o644)
    (home / "artifacts").chmod(0o755)
    home.chmod(0o755)
    told = cli.run("up", "--recipe", str(recipe))
    try:
        assert all(name in told for name in ("prefect", "mlflow", "service", "runner", "first look whether"))
        for command, said in (("up", "up already, at http://127"), ("serve", "served already, at http://127")):
            with cli.start(command, "--recipe", str(recipe)) as second:
                output, _ = second.communicate(timeout=60)
            assert (second.returncode, said in output) == (2, True), output
        cli.run("traffic", "--recipe", str(recipe), "--domain", "code")
        _run_short_of_memory_while_it_trains(settings, memory)  # F29
        wait_until(lambda: overview(settings).last_refresh is not None, 240, None, "a refresh by itself")
        newest = overview(settings).drafts[0]
        assert newest.rows
        if newest.verdict != "passed":
            cli.run("promote", str(newest.version), "--force", "made-up models learn little")
        wait_until(lambda: draft() == newest.version, 60, None, "the swap")
        shown = cli.run("status")
        assert f"draft {newest.version}, speculation on" in shown
        assert "answered with 200: " in shown
        cli.run("rollback")
        wait_until(lambda: draft() == 1, 60, None, "the swap back")
        assert "parent" in cli.run("diff", "1", str(newest.version))
        os.kill(_programs(home)["service"].pid or 0, signal.SIGKILL)
        wait_until(lambda: _programs(home)["service"].restarts == 1, 60, None, "the service's second start")
        wait_until(lambda: _programs(home)["service"].ready and draft() == 1, 180, None, "its draft")
        assert "runner: " in cli.run("logs", "runner", "-n", "3")
        programs = _programs(home)
        # Serve's replica listens for other nodes on every address, and no setting changes that (SECURITY.md).
        assert len([address for address, _ in _listening(home) if not address.endswith("127.0.0.1")]) <= 1
        wait_until(lambda: _open_to_others(home) == [], 60, None, "all of the home to be closed, Ray's folder too")
        environments = _environments(home)
        assert not [env for env in environments if CLIENTS_KEY in env.values()]
        assert {env["RAY_AUTH_MODE"] for env in environments if "RAY_AUTH_TOKEN" in env} == {"token"}
        url = programs["service"].url
        assert [_asked(url, key) for key in (None, CLIENTS_KEY)] == [401, 200]
        ports = {int(program.url.rpartition(":")[2]) for program in programs.values() if program.url}
        assert ports <= {port for _, port in _listening(home)}
        assert _let_in(home, url) == []  # F38
    finally:
        cli.run("down")
    assert all(process_identity(program.pid) is None for program in programs.values())
    for port in ports:
        with socket.socket() as probe:
            assert probe.connect_ex(("127.0.0.1", port)) != 0
    with cli.start("down") as again:
        output, _ = again.communicate(timeout=60)
    assert (again.returncode, "not up" in output) == (2, True)


def _programs(home: Path) -> dict[str, ProcessRecord]:
    state = read_state(home)
    assert state is not None
    return {program.name: program for program in state.programs}


def _run_short_of_memory_while_it_trains(settings: Settings, memory: Memory) -> None:
    trigger = TriggerStore(settings.querylog)

    def trains() -> bool:
        with closing(sqlite3.connect(settings.querylog)) as db:
            return bool(db.execute("SELECT count(*) FROM claim").fetchone()[0])

    wait_until(trains, ENDS_S, None, "a refresh that reads rows")
    memory.use(0.92)
    wait_until(lambda: trigger.state().waits_for_memory, 60, None, "the trainer's end")
    assert overview(settings).waiting.what == "memory"
    assert _asked(_programs(settings.home)["service"].url, CLIENTS_KEY) == 200
    # The run after the one that was ended may be cancelled, since Prefect still counts that.
    told = "0.0 GiB to spare"
    wait_until(lambda: told in overview(settings).waiting.words, 90, None, "a look that says what lacks")
    seen = overview(settings)
    assert (seen.waiting.what, seen.last_refresh) == ("memory", None)
    started_again = {name for name, program in _programs(settings.home).items() if program.restarts}
    assert started_again <= {"post-promotion"}
    memory.use(0.5)


def _let_in(home: Path, service: str) -> list[str]:
    """Return what somebody without the home's secrets got out of all that listens here."""
    programs, ports = _programs(home), sorted({port for _, port in _listening(home)})
    with ThreadPoolExecutor(len(ports)) as pool:  # most of them answer nobody, and are waited for
        answered = [line for lines in pool.map(_asked_by_http, ports) for line in lines]
        as_ray = partial(_asked_as_ray, home_secret(home, "ray.key").hex())
        by_ray = dict(zip(ports, pool.map(as_ray, ports), strict=True))
    answered += [f"Ray at {port}: {call}" for port, (_, strangers) in by_ray.items() for call in strangers]
    assert {call for known, _ in by_ray.values() for call in known} == set(RAY_CALLS)  # with the token they do matter
    user, _, password = pages_login(home).partition(":")
    for name, path in ((PREFECT, "/api/flows/filter"), (MLFLOW, "/")):  # from a foreign page, with the secret
        for header in FOREIGN.items():
            url, login = programs[name].url + path, (user, password)
            got = httpx.post(url, headers=[header], auth=login, json={}, trust_env=False, timeout=60)
            answered += [f"{name} {header}: {got.status_code}"] * (got.status_code != 403)
    answered += ["a client operates"] * (_asked(service, CLIENTS_KEY, "/redraft/status") != 403)
    if os.getuid() == 0:  # another user of the machine, who looks for secrets in the home
        files = [home / name for name in ("ray.key", "pages.key", "operator.key", "queries.db", "service.json")]
        read = [subprocess.run(["cat", file], user=65534, check=False, capture_output=True) for file in files]
        answered += [f"{one.args[1]} can be read" for one in read if one.returncode == 0]
    return answered


def _asked_by_http(port: int) -> list[str]:
    """Return what a port answers without a key that tells anything."""
    with socket.create_connection(("127.0.0.1", port), timeout=1.5) as asked:
        asked.sendall(b"GET /nothing HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        try:
            speaks = asked.recv(5) == b"HTTP/"
        except OSError:
            speaks = False
    found = []
    for method, path, headers in itertools.product(("GET", "POST"), PATHS, ({}, FOREIGN)) if speaks else ():
        url = f"http://127.0.0.1:{port}{path}"
        got = httpx.request(method, url, headers=headers, json={}, trust_env=False, timeout=60)
        if (got.is_success and not got.text.startswith(HARMLESS)) or "access-control-allow-origin" in got.headers:
            found.append(f"{method} {port}{path} {headers}: {got.status_code} {got.text[:80]}")
    return found


def _asked_as_ray(token: str, port: int) -> tuple[list[str], list[str]]:
    """Return which of Ray's calls a port answers with the token, and which without."""
    found: tuple[list[str], list[str]] = ([], [])
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        for call, sent in itertools.product(RAY_CALLS, (token, None, "0" * 64)):
            metadata = [] if sent is None else [("authorization", f"Bearer {sent}")]
            try:
                channel.unary_unary(call)(b"", timeout=1.5, metadata=metadata)
            except grpc.RpcError as error:
                if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                    break  # it does not speak this
            else:
                found[sent != token].append(call)
    return found


def _family(home: Path) -> list[psutil.Process]:
    """Return the supervisor and all that it runs."""
    state = read_state(home)
    assert state is not None
    supervisor = psutil.Process(state.pid)
    return [supervisor, *supervisor.children(recursive=True)]


def _listening(home: Path) -> set[tuple[str, int]]:
    """Return the addresses that the supervisor's family listens on."""
    family, found = {process.pid for process in _family(home)}, psutil.net_connections(kind="inet")
    return {(c.laddr.ip, c.laddr.port) for c in found if c.status == psutil.CONN_LISTEN and c.pid in family}


def _environments(home: Path) -> list[dict[str, str]]:
    """Return the environments of the supervisor's family."""
    found = []
    for process in _family(home):
        with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            found.append(process.environ())
    return found


def _asked(url: str, key: str | None, path: str = "/v1/models") -> int:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    return httpx.get(f"{url}{path}", headers=headers, timeout=60, trust_env=False).status_code


def _open_to_others(home: Path) -> list[str]:
    """Return what of a home other users could read or change if they came past its door."""
    found, door = [], Path(tempfile.gettempdir()) / f"redraft-{os.getuid()}"
    for path in (home, *home.rglob("*"), *(path for path in (door,) if path.exists())):
        with suppress(FileNotFoundError):
            mode = path.lstat().st_mode
            if mode & 0o077 and not stat.S_ISLNK(mode):
                found.append(f"{stat.filemode(mode)} {path}")
    return found
