"""The only look-up of methods: the directory is the registry.

A family is a folder of `models/`, a method is a module or a package in it whose name doesn't begin with "_". Nothing is
imported until `load`, so listing a family costs no torch.
"""

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from types import ModuleType
from typing import Annotated, Any

from pydantic import BeforeValidator, SerializeAsAny

from models.params import BaseParams, did_you_mean, validate

_ROOT = Path(__file__).parent


def names(family: str) -> list[str]:
    """Return the names of a family's methods, sorted.

    Raises:
        ValueError: there is no such family.
    """
    families = [module.name for module in iter_modules([str(_ROOT)]) if module.ispkg]
    if family not in families:
        raise ValueError(f'no family "{family}"{did_you_mean(family, families)}')
    modules = iter_modules([str(_ROOT / family)])
    return sorted(module.name for module in modules if not module.name.startswith("_"))


def load(family: str, name: str) -> ModuleType:
    """Import one method's module.

    Raises:
        ValueError: there is no such family, or no such method in it.
    """
    choices = names(family)
    if name not in choices:
        raise ValueError(f'no method "{name}" in {family}{did_you_mean(name, choices)}')
    return import_module(f"models.{family}.{name}")


def parse(family: str, table: Mapping[str, Any]) -> BaseParams:
    """Build the `Params` of the method that `table["name"]` names.

    Args:
        family: the method's folder.
        table: one table of a recipe.

    Raises:
        ValueError: `name` is missing or unknown, or a key is misspelt, missing or holds a wrong value.
    """
    name = table.get("name")
    if not isinstance(name, str):
        raise ValueError(f'{family}: key "name" must be a method{did_you_mean("", names(family))}; got {name!r}')
    return validate(load(family, name).Params, table, f"{family}.{name}")


def method_of(family: str) -> Any:
    """Return the type of a pydantic field that holds the parameters of one of a family's methods."""

    def parse_table(value: object) -> object:
        return parse(family, value) if isinstance(value, Mapping) else value

    return Annotated[SerializeAsAny[BaseParams], BeforeValidator(parse_table)]
