"""Recipes as files: one that ships, by its name, or any TOML file, by its path."""

import difflib
import tomllib
from pathlib import Path

from tasks.recipe import Demo, Recipe, parse_recipe

__all__ = ["DEFAULT_RECIPE", "Demo", "Recipe", "load_recipe", "shipped_recipes"]

DEFAULT_RECIPE = "smollm2-cpu"
_FOLDER = Path(__file__).parent / "recipes"


def shipped_recipes() -> dict[str, Path]:
    """Return name to file of the recipes that ship."""
    return {path.stem: path for path in sorted(_FOLDER.glob("*.toml"))}


def load_recipe(name_or_path: str) -> Recipe:
    """Read and parse a recipe.

    Args:
        name_or_path: the name of one that ships, or the path of a TOML file.

    Raises:
        ValueError: there is no such recipe, it is not TOML, or a table, key or value in it is wrong.
    """
    shipped = shipped_recipes()
    path = shipped.get(name_or_path, Path(name_or_path))
    if not path.is_file():
        near = difflib.get_close_matches(name_or_path, shipped, n=1)
        hint = f' (did you mean "{near[0]}"?)' if near else ""
        raise ValueError(f'no recipe "{name_or_path}"{hint}; give a TOML file or one of: {", ".join(shipped)}')
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # not TOML, or not UTF-8
        raise ValueError(f"{path} can't be read as TOML: {error}") from error
    return parse_recipe({"name": path.stem, **tables}, path.name)
