"""Prefect's server and MLflow's page as `redraft up` runs them, asked by strangers on the same machine."""

import shutil
import stat
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import httpx
import pytest

from flows.up import pages
from infra.auth_middleware import pages_login
from infra.events import Emitter
from infra.processes import Child, answers, wait_until
from infra.service_process import MLFLOW, PREFECT
from infra.settings import Settings

pytestmark = pytest.mark.engine  # no engine, but servers that take as long to start

# What a local program or a web page would try: run code by a new deployment's flow, read what is there.
TRIED = {
    PREFECT: ("/api/flows/filter", "/api/deployments/", "/api/events", "/api/admin/settings"),
    MLFLOW: ("/", "/ajax-api/2.0/mlflow/registered-models/search", "/api/2.0/mlflow/experiments/create"),
}
ALLOWED = {
    PREFECT: ("POST", "/api/flows/filter", {}),
    MLFLOW: ("GET", "/ajax-api/2.0/mlflow/registered-models/search", None),
}


@pytest.fixture(scope="module")
def home(store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home with an empty registry."""
    home = tmp_path_factory.mktemp("guarded") / "home"
    home.mkdir(mode=0o700)
    shutil.copy(store, home)
    (home / "mlflow.db").chmod(0o600)
    return home


@pytest.fixture(scope="module", params=[PREFECT, MLFLOW])
def running(home: Path, request: pytest.FixtureRequest) -> Iterator[tuple[str, str, str]]:
    """A program that runs: its name, its address, and what it asks for."""
    settings = Settings(home=home, host="0.0.0.0")
    [program] = [one for one in pages(settings) if one.name == request.param]
    env = settings.process_variables() | dict(program.env) | {"REDRAFT_HOME": str(home)}
    with Child.start(program.argv, env, home / "logs" / f"{program.name}.log", program.name) as child:
        wait_until(lambda: answers(program.health), 120, child, program.health)
        yield program.name, program.url, pages_login(home)


def test_it_binds_loopback_whatever_the_service_binds_and_answers_nothing_without_the_secret(
    running: tuple[str, str, str],
) -> None:
    name, url, _ = running
    assert url.startswith("http://127.0.0.1:")
    for path, method, auth in product(TRIED[name], ("GET", "POST"), (None, ("redraft", "guessed"))):
        answer = httpx.request(method, url + path, json={}, auth=auth, trust_env=False, timeout=60)
        assert answer.status_code == 401, (path, answer.text)


def test_with_the_secret_it_answers_and_foreign_pages_are_refused_even_so(running: tuple[str, str, str]) -> None:
    name, url, login = running
    method, path, body = ALLOWED[name]
    user, _, password = login.partition(":")

    asked = {"json": body, "auth": (user, password), "trust_env": False, "timeout": 60}

    def ask(**headers: str) -> httpx.Response:
        return httpx.request(method, url + path, headers=headers, **asked)

    assert ask().status_code == 200
    assert ask(Origin=url).status_code == 200
    for headers in ({"Host": "evil.example"}, {"Origin": "http://evil.example"}, {"Origin": "http://localhost:1"}):
        answer = ask(**headers)
        assert answer.status_code == 403
        assert "access-control-allow-origin" not in answer.headers
    preflight = {"Origin": "http://evil.example", "Access-Control-Request-Method": "POST"}
    answer = httpx.options(url + path, headers=preflight, trust_env=False, timeout=60)
    assert (answer.status_code, "access-control-allow-origin" in answer.headers) == (403, False)


def test_our_own_events_carry_the_secret(running: tuple[str, str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    name, url, login = running
    if name != PREFECT:
        return
    for told, sent in (("redraft:guessed", 0), (login, 1)):
        monkeypatch.setenv("PREFECT_API_AUTH_STRING", told)
        emitter = Emitter(f"{url}/api")
        emitter.emit("redraft.test", "code", {})
        emitter.close()
        assert (emitter.sent, emitter.dropped) == (sent, 1 - sent)


def test_what_it_wrote_is_closed_to_other_users(running: tuple[str, str, str], home: Path) -> None:
    found = [path for path in home.rglob("*") if not path.is_symlink()]
    assert any(path.name == f"{running[0]}.log" for path in found)
    assert [f"{stat.filemode(path.stat().st_mode)} {path}" for path in found if path.stat().st_mode & 0o077] == []
