"""The service as a process of its own: started with a file of settings, asked over HTTP."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx

from infra.doctor import openmp_preload
from infra.processes import Child, answers, free_port, require_port_free, wait_until
from infra.settings import Settings

if TYPE_CHECKING:
    from tasks.recipe import Recipe

SERVED_NAME = "target"
START_TIMEOUT_S = 300.0
ASK_TIMEOUT_S = 2.0
# Answers of a proxy whose application is still starting.
STARTING = (httpx.codes.NOT_FOUND, httpx.codes.SERVICE_UNAVAILABLE)


def config_path(settings: Settings) -> Path:
    """Return the file that the last service was started with; `redraft status` finds the service by it."""
    return settings.home / "service.json"


def write_config(
    recipe: "Recipe", settings: Settings, orchestrator: str = "", changed: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Write what the service needs to know (services/config.py) and return it.

    Args:
        recipe: what is served.
        settings: where everything lies.
        orchestrator: a Prefect API or "".
        changed: keys that differ from what the recipe says.

    Raises:
        ValueError: nothing was built yet, or the port is taken.
    """
    from tasks.promote import open_champions  # torch: too slow for who only asks how the service is

    pair = open_champions.fn()
    config = {
        "target_dir": str(pair.target_files.path),
        "target_version": pair.target.number,
        "draft": recipe.draft.name,
        "engine": recipe.engine.model_dump(mode="json"),
        "registry_uri": settings.mlflow_uri,
        "artifact_root": str(settings.artifacts / "mlflow"),
        "querylog": str(settings.querylog),
        "cache": str(settings.cache),
        "state": str(settings.home / "service-state.json"),
        "host": settings.host,
        "port": recipe.serve.port,
        "api_keys": list(settings.api_keys),
        "served_name": SERVED_NAME,
        "tool_parser": recipe.serve.tool_parser,
        "poll_s": recipe.serve.poll_s,
        "min_swap_interval_s": recipe.serve.min_swap_interval_s,
        "orchestrator": orchestrator,
        "watch": recipe.serve.watch.model_dump(),
        **(changed or {}),
    }
    config["port"] = config["port"] or free_port(settings.host)
    require_port_free(settings.host, config["port"])
    path = config_path(settings)
    path.touch(mode=0o600)  # it holds the keys
    path.write_text(json.dumps(config, indent=1) + "\n")
    return config


def start_service(
    recipe: "Recipe", settings: Settings, orchestrator: str = "", changed: Mapping[str, Any] | None = None
) -> tuple[Child, str]:
    """Start the service, wait until it answers, and return it with its URL; see `write_config`.

    Raises:
        ValueError: nothing was built yet, or the port is taken.
        RuntimeError: the service ended by itself.
    """
    config = write_config(recipe, settings, orchestrator, changed)
    url = f"http://{config['host']}:{config['port']}"
    argv = [sys.executable, "-m", "services.main", "--config", str(config_path(settings))]
    child = Child.start(argv, openmp_preload(), settings.home / "logs" / "service.log", "the service")
    try:
        wait_until(lambda: answers(f"{url}/healthz"), START_TIMEOUT_S, child, f"{url}/healthz")
    except BaseException:
        child.stop()
        raise
    return child, url


def last_url(settings: Settings) -> str:
    """Return the URL of the service that was started last, running or not.

    Raises:
        ValueError: no service was ever started here.
    """
    path = config_path(settings)
    if not path.is_file():
        raise ValueError("no service was started yet; run: redraft serve")
    config = json.loads(path.read_text())
    return f"http://{config['host']}:{config['port']}"


def service_status(settings: Settings) -> tuple[str, dict[str, Any] | None]:
    """Return the URL of the last service and what it says of itself; None if none runs or it is not ready yet.

    Raises:
        ValueError: it answers something else, such as that the key is wrong.
    """
    if not config_path(settings).is_file():
        return "", None
    url = last_url(settings)
    headers = {"Authorization": f"Bearer {settings.api_keys[0]}"} if settings.api_keys else {}
    try:
        answer = httpx.get(f"{url}/redraft/status", headers=headers, timeout=ASK_TIMEOUT_S, trust_env=False)
    except httpx.TransportError:
        return url, None
    if answer.status_code in STARTING:
        return url, None
    if answer.status_code != httpx.codes.OK:
        raise ValueError(f"{url} answers {answer.status_code}: {answer.text[:200]}")
    return url, answer.json()
