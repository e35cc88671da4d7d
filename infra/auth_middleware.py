"""What stands before a page that knows nothing of strangers, such as Prefect's and MLflow's: names, origins, a secret.

    python -m infra.auth_middleware --port PORT [--login] APP

serves an ASGI application, by its import path as `module:name`, or `module:name()` for what makes one. A web page can
have its own name lead to loopback, or send requests there in a visitor's name; it can hide neither the Host that it
asks for nor the Origin that it comes from. With `--login` each request carries the home's secret too, as the password
of any user (HTTP Basic); without it the application asks for the secret itself.
"""

import argparse
import base64
import binascii
import hmac
import importlib
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from infra.home import close_to_others, home_secret
from infra.processes import hold_port
from infra.settings import load_settings

USER, SECRET = "redraft", "pages.key"
LOOPBACK = "127.0.0.1"
NAMES = ("localhost", LOOPBACK, "[::1]")
# What says only that a page is there; whoever starts one waits for it.
OPEN_PATHS = ("/health", "/api/health")


class AuthMiddleware:
    """ASGI middleware: the names that it may be asked by, with any port; without a password the application asks."""

    def __init__(self, app: Any, names: Sequence[str] = NAMES, password: str | None = None) -> None:
        self._app, self._names, self._password = app, names, password

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        refusal = self._refusal(scope)
        if refusal is None:
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await receive()  # the handshake, which is then refused
            await send({"type": "websocket.close", "code": 1008})
        else:
            status, text, headers = refusal
            headers = [(b"content-type", b"text/plain; charset=utf-8"), *headers]
            await send({"type": "http.response.start", "status": status, "headers": headers})
            await send({"type": "http.response.body", "body": text.encode()})

    def _refusal(self, scope: dict[str, Any]) -> tuple[int, str, list[tuple[bytes, bytes]]] | None:
        headers = {name.lower(): value.decode("latin-1") for name, value in scope["headers"]}
        host = headers.get(b"host", "").lower()
        name, _, port = host.rpartition(":")
        if (name if port.isdigit() else host) not in self._names:
            return 403, "this machine is asked by its own name\n", []
        origin = headers.get(b"origin")
        if origin is not None and urlsplit(origin).netloc.lower() != host:
            return 403, "another site's pages may not ask\n", []
        if self._password is None or scope["path"] in OPEN_PATHS:
            return None
        if hmac.compare_digest(_sent_password(headers.get(b"authorization", "")), self._password.encode()):
            return None
        return 401, "the home's secret is wanted\n", [(b"www-authenticate", b'Basic realm="redraft"')]


def pages_password(home: Path) -> str:
    """Return what the pages of a home ask for, made now if there is none."""
    return home_secret(home, SECRET).hex()


def pages_login(home: Path) -> str:
    return f"{USER}:{pages_password(home)}"


def mlflow_page() -> Any:
    """Return MLflow's page, set up as `mlflow server` would; MLflow reads where its store is when it is imported."""
    from mlflow.server.constants import ARTIFACT_ROOT_ENV_VAR, BACKEND_STORE_URI_ENV_VAR

    settings = load_settings()
    root = f"{settings.object_store}/mlflow" if settings.object_store else str(settings.mlflow_files)
    os.environ |= {BACKEND_STORE_URI_ENV_VAR: settings.mlflow_uri, ARTIFACT_ROOT_ENV_VAR: root}
    from mlflow.server.fastapi_app import app

    return app


def _sent_password(authorization: str) -> bytes:
    scheme, _, sent = authorization.partition(" ")
    try:
        return base64.b64decode(sent).partition(b":")[2] if scheme.lower() == "basic" else b""
    except binascii.Error:
        return b""


def _load(path: str) -> Any:
    module, _, name = path.removesuffix("()").partition(":")
    found = getattr(importlib.import_module(module), name)
    return found() if path.endswith("()") else found


def main(argv: Sequence[str] | None = None) -> int:
    """Serve a page until a signal comes, and return the exit code; 2 if its port is in use."""
    import uvicorn

    parser = argparse.ArgumentParser(
        prog="python -m infra.auth_middleware", description="Serve a page to this home alone."
    )
    parser.add_argument("app", help="import path, module:name, with () if it is to be called")
    parser.add_argument("--host", default=LOOPBACK)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--name", action="append", default=[], help="another name that it may be asked by")
    parser.add_argument("--login", action="store_true", help="ask for the home's secret")
    options = parser.parse_args(argv)
    settings = load_settings()
    settings.prepare_environment()
    password = pages_password(settings.home) if options.login else None
    try:
        port = hold_port(options.host, options.port)  # now: a page takes seconds to load
    except ValueError as error:
        print(f"infra.auth_middleware: {error}", file=sys.stderr)
        return 2
    with port as held, suppress(KeyboardInterrupt):
        guard = AuthMiddleware(_load(options.app), (*NAMES, *options.name), password)
        if (copied := settings.home / "prefect" / "ui").is_dir():  # with the modes that it has in the package
            close_to_others(copied)
        uvicorn.Server(uvicorn.Config(guard, log_level="warning")).run(sockets=[held])
    return 0


if __name__ == "__main__":
    sys.exit(main())
