"""Imports point one way, what is heavy is imported late, and every recipe that ships parses."""

import ast
import re
import subprocess
import sys

import pytest

from models.recipe import load_recipe, shipped_recipes
from tests.imports import OPEN, RECIPE, ROOMS, ROOT, TYPES, imported

ALLOWED = {
    "flows": {"flows", "tasks", "infra", RECIPE, "prefect"},
    "tasks": {"tasks", "models", *OPEN, "infra", "prefect", "torch", "mlflow", "ray"},
    "services": {"services", "models", *OPEN, "infra", "ray"},
    "models": {"models", *OPEN, "torch", "vllm"},
    "infra": {"infra", TYPES, "mlflow"},
}
VERBS = [file for file in sorted((ROOT / "tasks").glob("*.py")) if file.name != "__init__.py"]
# What a room starts as a process, by import path.
STARTED = {"infra": {"services.main", "services.attach", "services.record"}}
WATCHED = {*ROOMS, *OPEN, "prefect", "ray", "mlflow", "torch", "vllm"}


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_only_what_it_may(room: str) -> None:
    files = sorted((ROOT / room).rglob("*.py"))
    assert files
    for file in files:
        assert imported(file) & WATCHED <= ALLOWED[room], file


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_names_only_programs_of_others_that_it_starts(room: str) -> None:
    foreign = {*ROOMS} - ALLOWED[room]
    for file in sorted((ROOT / room).rglob("*.py")):
        constants = [node.value for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Constant)]
        paths = [one for one in constants if isinstance(one, str) and re.fullmatch(r"[a-z]+(\.[a-z_]+)+", one)]
        assert {one for one in paths if one.partition(".")[0] in foreign} <= STARTED.get(room, set()), file


def test_a_module_of_tasks_has_a_task() -> None:
    for file in VERBS:
        functions = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.FunctionDef)]
        decorators = [decorator for function in functions for decorator in function.decorator_list]
        called = [one.func if isinstance(one, ast.Call) else one for one in decorators]
        assert "task" in [one.id for one in called if isinstance(one, ast.Name)], (
            f"{file}: put it in a package of tasks"
        )


def test_tasks_know_ray_by_the_module_that_trains_on_it() -> None:
    importing = [file for file in sorted((ROOT / "tasks").rglob("*.py")) if "ray" in imported(file)]
    assert importing == [ROOT / "tasks" / "stages" / "workers.py"]


def test_the_types_that_rooms_share_need_pydantic_alone() -> None:
    assert imported(ROOT / "models" / "types.py") == {"typing", "pydantic"}


def test_vllm_comes_in_through_its_one_package() -> None:
    importing = {file for room in ROOMS for file in (ROOT / room).rglob("*.py") if "vllm" in imported(file)}
    package = ROOT / "models" / "engines" / "vllm"
    assert {file.parent for file in importing} == {package, package / "patches", package / "redraft_vllm"}


def test_the_command_line_and_the_recipe_start_without_heavy_libraries() -> None:
    heavy = "{'torch', 'transformers', 'prefect', 'mlflow', 'ray', 'vllm'}"
    code = f"import sys, flows.cli, models.recipe; assert not (found := {heavy} & sys.modules.keys()), found"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_commands_that_train_nothing_start_without_the_libraries_of_those_that_do() -> None:
    heavy = "{'torch', 'transformers', 'prefect', 'mlflow', 'matplotlib', 'ray', 'vllm'}"
    modules = ("tasks.promote", "tasks.send_traffic", "tasks.write_report", "infra.overview")
    tried = (f"import {one}; assert not (found := {heavy} & sys.modules.keys()), ('{one}', found)" for one in modules)
    code = "\n".join(["import sys", *tried])
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


@pytest.mark.parametrize("name", shipped_recipes())
def test_every_recipe_parses(name: str) -> None:
    assert load_recipe(name).name == name
