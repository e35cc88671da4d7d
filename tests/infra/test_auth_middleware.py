"""What stands before Prefect's and MLflow's pages, over an application of a few lines."""

import asyncio
import base64
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from infra.auth_middleware import AuthMiddleware, pages_login, pages_password
from infra.processes import Child, answers, free_port, port_is_free, wait_until
from tests.infra.rows import ROOT

PASSWORD = "the-homes-secret"


def ask(guard: AuthMiddleware, kind: str = "http", path: str = "/", **headers: str) -> tuple[Any, ...]:
    """Send one request; return its status or the websocket's last word, and the answer's headers."""
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": f"{kind}.connect"}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    raw = [(name.lower().encode(), value.encode("latin-1")) for name, value in headers.items()]
    asyncio.run(guard({"type": kind, "path": path, "headers": raw}, receive, send))
    return sent[0].get("status", sent[0]["type"]), dict(sent[0].get("headers", ()))


async def page(scope: dict[str, Any], _: Any, send: Any) -> None:
    if scope["type"] == "websocket":
        await send({"type": "websocket.accept"})
        return
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"page"})


def basic(login: str) -> str:
    return f"Basic {base64.b64encode(login.encode()).decode()}"


@pytest.mark.parametrize("host", ["localhost", "LocalHost:4200", "127.0.0.1:4200", "[::1]:4200"])
def test_the_machines_own_names_pass(host: str) -> None:
    assert ask(AuthMiddleware(page), Host=host)[0] == 200
    assert ask(AuthMiddleware(page), Host=host, Origin=f"http://{host}")[0] == 200
    assert ask(AuthMiddleware(page), "websocket", Host=host)[0] == "websocket.accept"


@pytest.mark.parametrize(
    ("host", "origin"),
    [
        (None, None),
        ("evil.example:4200", None),
        ("127.0.0.1.evil.example", None),
        ("localhost:4200", "http://evil.example"),
        ("localhost:4200", "http://localhost:3000"),
        ("localhost:4200", "null"),
        ("localhost:4200", "http://localhost:4200.evil.example"),
    ],
)
def test_a_foreign_page_is_refused_whatever_it_knows_and_told_nothing(host: str | None, origin: str | None) -> None:
    guard = AuthMiddleware(page, password=PASSWORD)
    headers = {name: value for name, value in (("Host", host), ("Origin", origin)) if value}
    status, answered = ask(guard, Authorization=basic(f"redraft:{PASSWORD}"), **headers)
    assert status == 403
    assert b"access-control-allow-origin" not in answered
    assert ask(guard, "websocket", **headers)[0] == "websocket.close"


def test_the_secret_is_asked_for_but_where_a_page_says_only_that_it_is_there() -> None:
    guard, host = AuthMiddleware(page, password=PASSWORD), {"Host": "localhost"}
    assert ask(guard, Authorization=basic(f"redraft:{PASSWORD}"), **host)[0] == 200
    assert ask(guard, path="/health", **host)[0] == 200
    for sent in ("", "Basic", "Basic ?", basic("redraft:"), basic(f"redraft:{PASSWORD}x"), f"Bearer {PASSWORD}"):
        status, answered = ask(guard, Authorization=sent, **host)
        assert (status, answered[b"www-authenticate"]) == (401, b'Basic realm="redraft"')
    assert ask(guard, path="/health/../api", **host)[0] == 401
    assert ask(guard, "websocket", **host)[0] == "websocket.close"


def test_a_home_has_one_password_that_only_its_owner_can_read(tmp_path: Path) -> None:
    assert pages_login(tmp_path) == f"redraft:{pages_password(tmp_path)}"
    assert len(pages_password(tmp_path)) == 64
    assert (tmp_path / "pages.key").stat().st_mode & 0o777 == 0o600


# Loads until a file is there.
SLOW_PAGE = """
import pathlib, time
print("loading", flush=True)
while not pathlib.Path("go").exists():
    time.sleep(0.05)
from tests.infra.test_auth_middleware import page
"""


@pytest.mark.slow
def test_a_page_has_its_port_before_it_is_loaded_and_answers_there_after(tmp_path, monkeypatch) -> None:
    (tmp_path / "slow.py").write_text(SLOW_PAGE)
    monkeypatch.chdir(tmp_path)
    argv = [sys.executable, "-m", "infra.auth_middleware", "--port", str(port := free_port()), "slow:page"]
    environment = {"REDRAFT_HOME": str(tmp_path), "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"}
    with Child.start(argv, environment, tmp_path / "log", "the page") as child:
        wait_until(lambda: "loading" in child.tail(), 60, child, "the page to be loaded")
        assert not port_is_free("127.0.0.1", port)
        (tmp_path / "go").touch()
        wait_until(lambda: answers(f"http://127.0.0.1:{port}/"), 60, child, "the page")
