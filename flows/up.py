"""All that runs all the time, as supervised processes on free ports: Prefect, MLflow, the service, the runner of flows,
and the post-promotion test.

    python -m flows.up --recipe FILE [--attached JSON]

`redraft up` starts this in the background and waits until all of it answers. In the place of a service of ours there
may be what follows the champion on somebody else's servers, and what records the requests to them.
"""

import argparse
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from flows.command import complete_erasures
from infra.auth_middleware import LOOPBACK, pages_login
from infra.files import last_lines
from infra.home import open_home
from infra.machine import openmp_preload, process_identity
from infra.processes import free_port, wait_until
from infra.service_process import (
    END_TIMEOUT_S,
    MLFLOW,
    PREFECT,
    RUNNER,
    SERVICE,
    START_TIMEOUT_S,
    Attached,
    attach_program,
    health_url,
    record_program,
    require_startable,
    service_argv,
    write_config,
)
from infra.settings import ATTACH_TOKEN, Settings, load_settings, sqlite_file
from infra.supervisor import STATE, Program, Supervisor, UpState, read_state
from models.recipe import Recipe, load_recipe

POST_PROMOTION, SUPERVISOR = "post-promotion", "supervisor"
# Whatever the service binds, these are for people on this machine who know the home's secret.
GUARDED = (sys.executable, "-m", "infra.auth_middleware", "--port")
UP_TIMEOUT_S, DOWN_TIMEOUT_S = 600.0, 120.0
POLL_S = 0.3


def start(recipe: str, settings: Settings, attached: Attached | None = None) -> UpState:
    """Start the supervisor in the background and wait until all programs answer.

    Raises:
        ValueError: as `supervisor_argv`.
        RuntimeError: a program did not start; nothing is left running.
    """
    argv = supervisor_argv(recipe, settings, attached)
    (settings.home / STATE).unlink(missing_ok=True)
    log_path = settings.home / "logs" / f"{SUPERVISOR}.log"
    log_path.parent.mkdir(parents=True, exist_ok=True)
    with log_path.open("ab") as log:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    deadline_s = time.monotonic() + UP_TIMEOUT_S
    try:
        while time.monotonic() < deadline_s:
            state = read_state(settings.home)
            if state is not None and state.ready:
                return state
            if process.poll() is not None:
                raise RuntimeError(f"redraft did not come up: {_failure(settings, log_path)}")
            time.sleep(POLL_S)
        raise RuntimeError(f"redraft did not come up in {UP_TIMEOUT_S:g} s; see: redraft logs")
    except BaseException:
        process.terminate()
        process.wait(DOWN_TIMEOUT_S)
        (settings.home / STATE).unlink(missing_ok=True)
        raise


def supervisor_argv(recipe: str, settings: Settings, attached: Attached | None = None) -> list[str]:
    """Return how the supervisor is started.

    ValueError if something runs here already, or the service can't be started, see `configure_service` and
    `require_startable`; or if the token of the servers to attach to is not set.
    """
    if (running := read_state(settings.home)) is not None:
        at = running.url(SERVICE) or "an address that is not known yet"
        raise ValueError(f"redraft is up already, at {at} (process {running.pid}); see: redraft status")
    parsed = load_recipe(recipe)
    argv = [sys.executable, "-m", "flows.up", "--recipe", recipe]
    if attached is None:
        require_startable(settings, parsed.serve.port)
    elif not os.environ.get(ATTACH_TOKEN):
        raise ValueError(f"set {ATTACH_TOKEN} to the token that the server was started with")
    else:
        argv += ["--attached", attached.model_dump_json()]
    from tasks.check_recipe import configure_service  # brings transformers, which takes seconds

    configure_service.fn(parsed)
    return argv


def stop(settings: Settings) -> None:
    """End the supervisor and all that it runs; ValueError if nothing runs here, TimeoutError if it did not end."""
    state = read_state(settings.home)
    if state is None:
        raise ValueError("redraft is not up, so there is nothing to stop")
    os.kill(state.pid, signal.SIGTERM)
    ended = f"the end of process {state.pid}"
    wait_until(lambda: process_identity(state.pid) != state.identity, DOWN_TIMEOUT_S, None, ended)


def _failure(settings: Settings, log_path: Path) -> str:
    file = settings.home / STATE
    if file.is_file() and (failure := UpState.model_validate_json(file.read_bytes()).failure):
        return failure
    return "\n".join(last_lines(log_path, 5))


def pages(settings: Settings) -> list[Program]:
    """Return Prefect's server and, where its store is the home's, MLflow's page: for who knows the home's secret."""
    port = free_port()
    prefect, login = f"http://{LOOPBACK}:{port}", pages_login(settings.home)
    programs = [
        Program(
            PREFECT,
            [*GUARDED, str(port), "prefect.server.api.server:create_app()"],
            url=prefect,
            health=f"{prefect}/api/health",
            env={
                "PREFECT_API_URL": f"{prefect}/api",
                "PREFECT_UI_API_URL": f"{prefect}/api",
                "PREFECT_API_AUTH_STRING": login,
                "PREFECT_SERVER_API_AUTH_STRING": login,
                "PREFECT__SERVER_FINAL": "1",  # as `prefect server start` has it
            },
        )
    ]
    if sqlite_file(settings.mlflow_uri) is not None:
        port = free_port()
        mlflow = f"http://{LOOPBACK}:{port}"
        argv = [*GUARDED, str(port), "--login", "infra.auth_middleware:mlflow_page()"]
        programs.append(Program(MLFLOW, argv, url=mlflow, health=f"{mlflow}/health"))
    return programs


def programs_of(recipe: str, settings: Settings, attached: Attached | None) -> list[Program]:
    """Return all that is to run, with its settings in the home; ValueError if something of it can't be started."""
    programs = pages(settings)
    orchestrated = {name: programs[0].env[name] for name in ("PREFECT_API_URL", "PREFECT_API_AUTH_STRING")}
    parsed = load_recipe(recipe)
    from tasks.check_recipe import configure_service

    config = configure_service.fn(parsed, orchestrated["PREFECT_API_URL"])
    served = _service(parsed, settings, config) if attached is None else _attached(settings, config, attached)
    programs += [replace(program, env={**program.env, **orchestrated}) for program in served]
    # What may train comes once requests are answered: it would hold up their start.
    imported = ["--imported"] if attached is not None and attached.read_metrics else []
    for name, module, more in ((RUNNER, "flows.deployments", []), (POST_PROMOTION, "flows.post_promotion", imported)):
        argv = [sys.executable, "-m", module, "--recipe", recipe, *more]
        programs.append(Program(name, argv, env=orchestrated, after=(PREFECT, served[-1].name)))
    return programs


def _service(recipe: Recipe, settings: Settings, config: Mapping[str, Any]) -> list[Program]:
    service = write_config(config, settings)
    return [
        Program(
            SERVICE,
            service_argv(settings),
            url=service,
            health=health_url(service),
            env=openmp_preload(),
            start_timeout_s=START_TIMEOUT_S,
            grace_s=recipe.serve.drain_s + END_TIMEOUT_S,
        )
    ]


def _attached(settings: Settings, config: Mapping[str, Any], attached: Attached) -> list[Program]:
    followed = {**config, **attached.model_dump(exclude={"recorded", "models", "port", "ca"})}
    programs = [attach_program(followed, settings)]
    if attached.models:
        recorded = {"server": attached.recorded, **attached.model_dump(include={"models", "port", "ca"})}
        recorded |= {name: config[name] for name in ("target_dir", "target_version")}
        programs.append(record_program(recorded, settings))
    return programs


def main() -> int:
    """Supervise until SIGTERM or SIGINT, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m flows.up", description="Run everything, supervised.")
    parser.add_argument("--recipe", required=True)
    parser.add_argument("--attached", type=Attached.model_validate_json)
    given = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    settings = load_settings()
    settings.prepare_environment()
    try:
        open_home(settings)
        complete_erasures(settings)
        programs = programs_of(given.recipe, settings, given.attached)
    except ValueError as error:
        print(error, flush=True)
        return 2
    return Supervisor(programs, settings.home, given.recipe).run()


if __name__ == "__main__":
    sys.exit(main())
