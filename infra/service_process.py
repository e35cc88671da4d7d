"""The service as a process of its own: started with a file of settings, and found again by that file."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx

from infra.client import Client
from infra.doctor import openmp_preload
from infra.processes import Child, answers, free_port, require_port_free, wait_until
from infra.settings import Settings
from infra.status import RunningService

START_TIMEOUT_S = 300.0
# What a service takes to end, beyond the time that running requests get.
END_TIMEOUT_S = 30.0
ASK_TIMEOUT_S = 2.0
# Answers of a proxy whose application is still starting.
STARTING = (httpx.codes.NOT_FOUND, httpx.codes.SERVICE_UNAVAILABLE)


def config_path(settings: Settings) -> Path:
    """Return the file that the last service was started with; `redraft status` finds the service by it."""
    return settings.home / "service.json"


def write_config(config: Mapping[str, Any], settings: Settings) -> str:
    """Write what the service is to know (services/config.py), and return the URL that it will have.

    Args:
        config: port 0 takes a free one.
        settings: where everything lies.

    Raises:
        ValueError: the port is taken.
    """
    host, port = config["host"], config["port"] or free_port(config["host"])
    require_port_free(host, port)
    path = config_path(settings)
    path.touch(mode=0o600)  # it holds the keys
    path.write_text(json.dumps({**config, "port": port}, indent=1) + "\n")
    return f"http://{host}:{port}"


def service_argv(settings: Settings) -> list[str]:
    """Return the program that serves what was written."""
    return [sys.executable, "-m", "services.main", "--config", str(config_path(settings))]


def health_url(url: str) -> str:
    """Return what a service answers as soon as it is ready."""
    return f"{url}/healthz"


def start_service(config: Mapping[str, Any], settings: Settings) -> tuple[Child, str]:
    """Start the service, wait until it answers, and return it with its URL; see `write_config`.

    Raises:
        ValueError: the port is taken.
        RuntimeError: the service ended by itself.
    """
    url = write_config(config, settings)
    child = Child.start(service_argv(settings), openmp_preload(), settings.home / "logs" / "service.log", "the service")
    try:
        wait_until(lambda: answers(health_url(url)), START_TIMEOUT_S, child, health_url(url))
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


def last_status(settings: Settings) -> RunningService | None:
    """Return what the last service says of itself; None if none runs or it is not ready yet.

    Raises:
        ValueError: it answers something else, such as that the key is wrong.
    """
    if not config_path(settings).is_file():
        return None
    url = last_url(settings)
    with Client(url, settings.api_key, ASK_TIMEOUT_S) as client:
        try:
            return client.status()
        except httpx.TransportError:
            return None
        except httpx.HTTPStatusError as error:
            if error.response.status_code in STARTING:
                return None
            raise ValueError(f"{url} answers {error.response.status_code}: {error.response.text[:200]}") from error
