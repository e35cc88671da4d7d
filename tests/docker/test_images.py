"""The images can't be built here; what can be held is that they name what exists."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command

from flows import cli, deployments
from infra.settings import load_settings
from models.recipe import load_recipe

ROOT = Path(__file__).parents[2]
IMAGES = sorted((ROOT / "docker").glob("*.Dockerfile"))
INSTRUCTIONS = {"FROM", "RUN", "WORKDIR", "COPY", "USER", "ENV", "VOLUME", "ENTRYPOINT", "CMD"}


def instructions(file: Path) -> list[tuple[str, str]]:
    """Return keyword and rest of each instruction, continued lines joined."""
    lines = (line for line in file.read_text().splitlines(keepends=True) if not line.startswith("#"))
    text = re.sub(r"\\\n\s*", "", "".join(lines))
    return [tuple(line.split(maxsplit=1)) for line in text.splitlines() if line]


@pytest.mark.parametrize("image", IMAGES, ids=lambda path: path.stem)
def test_an_image_copies_what_is_there_and_runs_a_command_as_an_ordinary_user(image: Path) -> None:
    steps = instructions(image)
    assert {keyword for keyword, _ in steps} <= INSTRUCTIONS
    assert steps[0][0] == "FROM"
    assert ":" in steps[0][1], "a base image without a version changes by itself"
    for keyword, rest in steps:
        if keyword == "COPY":
            *sources, _ = rest.split()
            assert all((ROOT / source).exists() for source in sources), rest
    copied = " ".join(rest for keyword, rest in steps if keyword == "COPY")
    assert all(package in copied for package in ("flows", "infra", "models", "services", "tasks"))
    last = dict(steps)
    assert last["USER"] == "redraft"
    assert json.loads(last["ENTRYPOINT"]) == ["redraft"]
    require_command(json.loads(last["CMD"]))
    load_settings(dict(pair.split("=", 1) for pair in shlex.split(last["ENV"]) if pair.startswith("REDRAFT_")))


def require_command(arguments: list[str]) -> None:
    """Raise unless the command line takes `arguments`."""
    command = get_command(cli.app).commands[arguments[0]]
    command.make_context(arguments[0], list(arguments[1:]))


@pytest.fixture(scope="module")
def stack() -> dict[str, Any]:
    return yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text())


def test_the_stack_builds_an_image_that_is_there_and_starts_what_exists(stack: dict[str, Any]) -> None:
    for name, service in stack["services"].items():
        assert (ROOT / "docker" / service["build"]["context"] / service["build"]["dockerfile"]).is_file(), name
        assert set(service.get("depends_on", {})) <= stack["services"].keys()
        for volume in service["volumes"]:
            assert volume.partition(":")[0] in stack["volumes"]
        if "entrypoint" not in service:
            require_command(service["command"])
    assert stack["services"]["runner"]["entrypoint"][-1] == deployments.__name__
    assert load_recipe(stack["services"]["runner"]["command"][-1])


def test_only_the_endpoint_is_open_to_other_machines_and_it_asks_for_a_key(stack: dict[str, Any]) -> None:
    for name, service in stack["services"].items():
        for port in service.get("ports", ()):
            assert port.startswith("127.0.0.1:") or name == "serve"
    holding = {name for name, service in stack["services"].items() if "REDRAFT_API_KEYS" in service["environment"]}
    assert holding == {"serve"}
    assert "?" in stack["services"]["serve"]["environment"]["REDRAFT_API_KEYS"]


def test_the_stack_sets_only_variables_that_are_settings(stack: dict[str, Any]) -> None:
    for service in stack["services"].values():
        own = {name: value for name, value in service["environment"].items() if name.startswith("REDRAFT_")}
        load_settings(own | {"REDRAFT_API_KEYS": "a-clients-key"})
