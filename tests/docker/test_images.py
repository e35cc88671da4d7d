"""No image is built here; what can be held is that they name what exists, and agree with each other."""

import json
import re
import shlex
import subprocess
import tomllib
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml
from typer.main import get_command

from flows import cli, deployments
from infra.post_promotion import PostPromotionTests
from infra.settings import Settings, load_settings
from models.recipe import load_recipe

ROOT = Path(__file__).parents[2]
IMAGES = sorted((ROOT / "docker").glob("*.Dockerfile"))
COMPOSE = (ROOT / "docker" / "compose.yaml").read_text()
STACK: dict[str, Any] = yaml.safe_load(COMPOSE)
SERVICES: dict[str, Any] = STACK["services"]
OURS = {name: service for name, service in SERVICES.items() if "build" in service}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CUDA_OF = {"torch==2.13.0": "13.0"}  # what the wheel of the index asks for, cuda-toolkit==13.0.3
ONCE = {"bucket", "build"}  # end by themselves
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
    copied = [source for keyword, rest in steps if keyword == "COPY" for source in rest.split()[:-1]]
    assert [source for source in copied if not (ROOT / source).exists()] == []
    assert {"flows", "infra", "models", "services", "tasks"} <= {source.rstrip("/") for source in copied}
    last = dict(steps)
    assert int(last["USER"]) > 0, "a cluster takes no name for a user that is not root"
    assert json.loads(last["ENTRYPOINT"]) == ["redraft"]
    require_command(json.loads(last["CMD"]))
    load_settings(dict(pair.split("=", 1) for pair in shlex.split(last["ENV"]) if pair.startswith("REDRAFT_")))


@pytest.mark.parametrize("image", IMAGES, ids=lambda path: path.stem)
def test_an_image_installs_extras_that_are_there_by_the_constraints(image: Path) -> None:
    installs = [rest for keyword, rest in instructions(image) if keyword == "RUN" and "pip install" in rest]
    for command in (command.split() for rest in installs for command in rest.split("&&") if "pip install" in command):
        assert command[command.index("-c") + 1] == "infra/constraints.txt", command
        pinned = {argument.removesuffix("+cpu") for argument in command if "==" in argument}
        assert pinned <= {*PROJECT["dependencies"]}, command
    [extras] = re.findall(r"'\.\[(.+?)\]'", " ".join(installs))
    assert {image.stem, "postgres", "s3"} == {*extras.split(",")} <= PROJECT["optional-dependencies"].keys()


def test_the_cuda_of_the_image_is_that_of_torch() -> None:
    [torch] = [one for one in PROJECT["dependencies"] if one.startswith("torch==")]
    assert dict(instructions(ROOT / "docker" / "cuda.Dockerfile"))["FROM"].startswith(f"nvidia/cuda:{CUDA_OF[torch]}.")


def require_command(arguments: list[str]) -> None:
    """Raise unless the command line takes `arguments`."""
    command = get_command(cli.app).commands[arguments[0]]
    command.make_context(arguments[0], list(arguments[1:]))


def test_the_stack_builds_an_image_that_is_there_and_starts_what_exists() -> None:
    for name, service in OURS.items():
        assert (ROOT / "docker" / service["build"]["context"] / service["build"]["dockerfile"]).is_file(), name
        if "entrypoint" not in service:
            require_command(service["command"])
        elif "--recipe" in service["command"]:
            assert find_spec(service["entrypoint"][-1]) is not None
            assert load_recipe(service["command"][-1])
        else:
            assert find_spec(service["entrypoint"][2]) is not None
    assert SERVICES["runner"]["entrypoint"][-1] == deployments.__name__


def test_what_the_stack_refers_to_is_there_and_of_a_version() -> None:
    for name, service in SERVICES.items():
        assert re.fullmatch(r"[a-z/]+:[a-z0-9.-]*\d[a-z0-9.-]*|redraft:cpu", service["image"]), name
        for volume in service.get("volumes", ()):
            assert volume.partition(":")[0] in STACK["volumes"]
        assert {one["source"] for one in service.get("configs", ())} <= STACK["configs"].keys()
        for other, how in service.get("depends_on", {}).items():
            assert how["condition"] == ("service_completed_successfully" if other in ONCE else "service_healthy")
            assert other in SERVICES


def test_what_goes_on_says_whether_it_is_well_at_a_port_that_it_listens_on() -> None:
    assert {name for name, service in SERVICES.items() if "healthcheck" not in service} == ONCE
    for name in ("prefect", "mlflow", "serve"):
        command = [*SERVICES[name].get("entrypoint", []), *SERVICES[name]["command"]]
        port = command[command.index("--port") + 1]
        assert f"http://127.0.0.1:{port}/" in SERVICES[name]["healthcheck"]["test"][-1]
        assert SERVICES[name]["ports"][0].endswith(f"{port}:{port}")
    assert SERVICES["serve"]["healthcheck"]["test"][-1].endswith("/readyz')")
    assert f":{urlsplit(STACK['x-redraft']['environment']['AWS_ENDPOINT_URL']).port}/" in str(
        SERVICES["s3"]["healthcheck"]
    )


def test_the_stacks_lock_is_that_of_the_post_promotion_test(tmp_path: Path) -> None:
    told = SERVICES["post-promotion"]
    [_, check] = told["healthcheck"]["test"]
    tests = PostPromotionTests(Settings(home=tmp_path))
    here = check.replace(told["environment"]["REDRAFT_HOME"], str(tmp_path))
    with tests.alone():
        assert subprocess.run(["sh", "-c", here], check=False).returncode == 0
    assert subprocess.run(["sh", "-c", here], check=False).returncode == 1


def test_ours_write_to_the_volume_and_a_folder_of_temporary_files_alone() -> None:
    for name, service in OURS.items():
        assert (service["read_only"], service["cap_drop"], service["tmpfs"]) == (True, ["ALL"], ["/tmp"]), name  # noqa: S108
        assert service["volumes"] == [f"home:{service['environment']['REDRAFT_HOME']}"]
    for image in IMAGES:
        assert f"REDRAFT_HOME={STACK['x-redraft']['environment']['REDRAFT_HOME']} " in dict(instructions(image))["ENV"]


def test_only_the_endpoint_is_open_to_other_machines_and_it_asks_for_a_key() -> None:
    for name, service in SERVICES.items():
        for port in service.get("ports", ()):
            assert port.startswith("127.0.0.1:") or name == "serve"
    holding = {name for name, service in OURS.items() if "REDRAFT_API_KEYS" in service["environment"]}
    assert holding == {"serve"}
    assert "?" in SERVICES["serve"]["environment"]["REDRAFT_API_KEYS"]


def test_the_stack_sets_only_variables_that_are_settings_and_holds_no_secret() -> None:
    for service in OURS.values():
        own = {name: value for name, value in service["environment"].items() if name.startswith("REDRAFT_")}
        load_settings(own | {"REDRAFT_API_KEYS": "a-clients-key"})
    secrets = [*re.findall(r"(?:PASSWORD|SECRET|SECRET_ACCESS_KEY|AUTH_STRING|secretKey\"): \"?(.+)", COMPOSE)]
    secrets += re.findall(r"redraft:([^@\s]+)@postgres", COMPOSE)
    assert len(secrets) >= 6
    assert [secret for secret in secrets if not secret.startswith("${")] == []
