"""`redraft up`, all real: a refresh by itself, a person rolls back, what is killed comes back, nothing is left."""

import json
import os
import shutil
import signal
import socket
from pathlib import Path

import psutil
import pytest

from infra.processes import process_identity, wait_until
from infra.supervisor import read_state
from tests.flows.conftest import Cli

pytestmark = pytest.mark.engine
RECIPE = Path(__file__).parents[2] / "models" / "recipes" / "tiny.toml"


@pytest.mark.timeout(900)
def test_a_refresh_happens_by_itself_and_a_person_has_the_last_word(built: tuple[Cli, str], tmp_path: Path) -> None:
    home = tmp_path / "home"
    shutil.copytree(built[0].home, home)
    cli = Cli(home)
    recipe = tmp_path / "online.toml"
    recipe.write_text('name = "tiny"\n' + RECIPE.read_text() + "\n[schedule]\nrefresh_interval_s = 20\n")

    def status() -> dict:
        return json.loads(cli.run("status", "--json").splitlines()[-1])

    told = cli.run("up", "--recipe", str(recipe))
    try:
        assert all(name in told for name in ("prefect", "mlflow", "service", "runner"))
        with cli.start("up", "--recipe", str(recipe)) as second:
            output, _ = second.communicate(timeout=60)
        assert (second.returncode, "up already" in output) == (2, True)
        cli.run("traffic", "--recipe", str(recipe), "--domain", "code")
        wait_until(lambda: status()["last_refresh"] is not None, 240, None, "a refresh by itself")
        refreshed = status()
        newest = refreshed["drafts"][0]
        assert newest["rows"]
        if newest["verdict"] != "passed":
            cli.run("promote", str(newest["version"]), "--force", "made-up models learn little")
        wait_until(lambda: status()["service"]["draft_version"] == newest["version"], 60, None, "the swap")
        shown = cli.run("status")
        assert f"draft {newest['version']}, speculation on" in shown
        assert "answered with 200: " in shown
        cli.run("rollback")
        wait_until(lambda: status()["service"]["draft_version"] == 1, 60, None, "the swap back")
        assert "parent" in cli.run("diff", "1", str(newest["version"]))
        service = next(program for program in status()["programs"] if program["name"] == "service")
        os.kill(service["pid"], signal.SIGKILL)
        wait_until(lambda: _ready_again(home), 180, None, "the service's second start")
        wait_until(lambda: (told := status()["service"]) is not None and told["draft_version"] == 1, 60, None, "it")
        assert "runner: " in cli.run("logs", "runner", "-n", "3")
        programs = status()["programs"]
        # Serve's replica listens for other nodes on every address, and no setting changes that (SECURITY.md).
        assert len([address for address, _ in _listening(home) if not address.endswith("127.0.0.1")]) <= 1
        urls = [program["url"] for program in programs if program["url"]]
        assert {int(url.rpartition(":")[2]) for url in urls} <= {port for _, port in _listening(home)}
    finally:
        cli.run("down")
    assert all(process_identity(program["pid"]) is None for program in programs)
    for program in programs:
        if program["url"]:
            with socket.socket() as probe:
                assert probe.connect_ex(("127.0.0.1", int(program["url"].rpartition(":")[2]))) != 0
    with cli.start("down") as again:
        output, _ = again.communicate(timeout=60)
    assert (again.returncode, "not up" in output) == (2, True)


def _listening(home: Path) -> set[tuple[str, int]]:
    """Return the addresses that the supervisor's family listens on."""
    state = read_state(home)
    assert state is not None
    family = {child.pid for child in psutil.Process(state.pid).children(recursive=True)}
    found = psutil.net_connections(kind="inet")
    return {(c.laddr.ip, c.laddr.port) for c in found if c.status == psutil.CONN_LISTEN and c.pid in family}


def _ready_again(home: Path) -> bool:
    state = read_state(home)
    assert state is not None
    service = next(program for program in state.programs if program.name == "service")
    return service.restarts == 1 and service.ready
