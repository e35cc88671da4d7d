"""Choosing documents by what the target accepts of the proxy, from a recipe's own tables."""

import tomllib
from pathlib import Path

import pytest

from models.recipe import shipped_recipes
from tasks.prepare_target import prepare_target
from tasks.prepare_text import prepare_text, read_documents
from tasks.select_text import select_text
from tests.tasks.made import recipe_of

pytestmark = pytest.mark.slow


def test_documents_are_chosen_by_what_the_target_accepts_of_the_proxy(home: Path) -> None:
    tables = tomllib.loads(shipped_recipes()["full-chain-tiny"].read_text())
    tables["text"] = {"chat": {**tables["text"]["chat"], "num_train": 12, "num_held_out": 4}}
    tables["finetune"]["domain"] = "chat"
    tables["select"] |= {"method": {"name": "acceptance_gap"}, "num_documents": 6, "num_rounds": 2}
    recipe = recipe_of(tables)
    target, text = prepare_target.fn(recipe.target), prepare_text.fn(recipe.text, recipe.seed)
    chosen = read_documents(select_text.fn(recipe.select, recipe.seed, target, text).path, "train")
    pool = read_documents(text.path, "train")
    assert len({document.model_dump_json() for document in chosen}) == 6
    assert all(document in pool for document in chosen)
