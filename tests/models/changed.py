"""Recipes for tests: those that ship, with other values of some keys."""

import tomllib
from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import pytest

from models.recipe import Recipe, parse_recipe, shipped_recipes

TEXT = {"source": {"name": "synthetic", "count": 60}, "num_train": 30, "num_held_out": 10}
TORCH = {"name": "torch", "num_draft_tokens": 2}
# By dotted key: the reference engine, which has no endpoint, instead of vLLM; a draft that is not trained.
REFERENCE: dict[str, Any] = {"serve": None, "demo": None, "engine": TORCH}
UNTRAINED: dict[str, Any] = {"draft": {"name": "ngram"}, "distill": {}, "refresh": None}


def tables_with(changes: Mapping[str, Any], recipe: str = "tiny") -> dict[str, Any]:
    """Return a recipe's tables with the values of dotted keys in the place of its own; None leaves a key out."""
    tables: dict[str, Any] = {"name": "r", **tomllib.loads(shipped_recipes()[recipe].read_text())}
    for path, value in changes.items():
        *parents, key = path.split(".")
        table = tables
        for parent in parents:
            table = table.setdefault(parent, {})
        table[key] = deepcopy(value)
        if value is None:
            del table[key]
    return tables


def parsed(changes: Mapping[str, Any], recipe: str = "tiny") -> Recipe:
    """Read such a recipe."""
    return parse_recipe(tables_with(changes, recipe), "r")


def require_kept(recipe: Recipe) -> Recipe:
    """Fail unless a recipe survives JSON; return it."""
    assert Recipe.model_validate_json(recipe.model_dump_json()) == recipe
    return recipe


def require_refused(changes: Mapping[str, Any], message: str, recipe: str = "tiny") -> None:
    """Fail unless such a recipe is refused with a message."""
    with pytest.raises(ValueError, match=message):
        parsed(changes, recipe)
