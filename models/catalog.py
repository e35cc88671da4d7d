"""The only look-up of methods: the directory is the registry.

A family is a folder of `models/`, a method is a module or a package in it whose name doesn't begin with "_". Nothing is
imported until `load`, so listing a family costs no torch; a process looks once.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from types import ModuleType
from typing import Any

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

from models.params import BaseParams, did_you_mean, validate

_ROOT = Path(__file__).parent


@cache
def families() -> list[str]:
    """Return the folders of `models/` that hold methods; these are made of what is in `core`."""
    return [module.name for module in iter_modules([str(_ROOT)]) if module.ispkg and module.name != "core"]


@cache
def names(family: str) -> list[str]:
    """Return the names of a family's methods, sorted; ValueError if there is no such family."""
    if family not in families():
        raise ValueError(f'no family "{family}"{did_you_mean(family, families())}')
    modules = iter_modules([str(_ROOT / family)])
    return sorted(module.name for module in modules if not module.name.startswith("_"))


def load(family: str, name: str) -> ModuleType:
    """Import one method's module; ValueError if there is no such family, or no such method in it."""
    choices = names(family)
    if name not in choices:
        raise ValueError(f'no method "{name}" in {family}{did_you_mean(name, choices)}')
    return import_module(f"models.{family}.{name}")


def parse(family: str, table: Mapping[str, Any]) -> BaseParams:
    """Build the `Params` of the method that `table["name"]` names; ValueError names it, or the key at fault."""
    name = table.get("name")
    if not isinstance(name, str):
        raise ValueError(f'{family}: key "name" must be a method{did_you_mean("", names(family))}; got {name!r}')
    params: BaseParams = validate(load(family, name).Params, table, f"{family}.{name}")
    return params


@dataclass(frozen=True)
class Method:
    """Marks a field as the parameters of a family's method, as in `Annotated[BaseParams, Method("sources")]`."""

    family: str

    def __get_pydantic_core_schema__(self, source: type[BaseParams], handler: GetCoreSchemaHandler) -> CoreSchema:
        whole = core_schema.simple_ser_schema("any")
        return core_schema.no_info_before_validator_function(self._parse, handler(source), serialization=whole)

    def _parse(self, value: object) -> object:
        return parse(self.family, value) if isinstance(value, Mapping) else value
