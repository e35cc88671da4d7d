"""Imports point one way, and every recipe that ships parses."""

import ast
from pathlib import Path

import pytest

from flows.recipe import load_recipe, shipped_recipes

ROOT = Path(__file__).parents[1]
ROOMS = ("flows", "infra", "models", "services", "tasks")
ALLOWED = {
    "flows": {"flows", "tasks", "infra", "prefect"},
    "tasks": {"tasks", "models", "infra", "prefect", "torch", "mlflow"},
    "services": {"services", "models", "infra", "ray", "vllm", "torch"},
    "models": {"models", "torch", "vllm"},
    "infra": {"infra", "mlflow"},
}
WATCHED = {*ROOMS, "prefect", "ray", "mlflow", "torch", "vllm"}


def imported(file: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module.partition(".")[0])
    return names


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_only_what_it_may(room: str) -> None:
    files = sorted((ROOT / room).rglob("*.py"))
    assert files
    for file in files:
        assert imported(file) & WATCHED <= ALLOWED[room], file


def test_vllm_comes_in_through_one_package_of_models() -> None:
    for file in (ROOT / "models").rglob("*.py"):
        if "engines/vllm" not in file.as_posix():
            assert "vllm" not in imported(file), file


@pytest.mark.parametrize("name", shipped_recipes())
def test_every_recipe_parses(name: str) -> None:
    assert load_recipe(name).name == name
