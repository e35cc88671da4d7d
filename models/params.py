"""The base of every method's settings, and errors that name the key at fault.

`validate` turns pydantic's report into a plain `ValueError` of one line a fault, because it is read by whoever wrote
the recipe, who has not seen the class.
"""

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

ModelT = TypeVar("ModelT", bound=BaseModel)


class Frozen(BaseModel):
    """A value: can't be changed, takes no unknown key."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class BaseParams(Frozen):
    """Settings of one method; a subclass sets `name` to a literal of its file's name."""

    name: str


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """Return the end of an error message: the nearest choice, if one is near, and all of them."""
    choices = sorted(choices)
    near = get_close_matches(word, choices, n=1)
    hint = f' (did you mean "{near[0]}"?)' if near else ""
    return f"{hint}; there are: {', '.join(choices) or 'none'}"


def validate(model: type[ModelT], values: Mapping[str, Any], where: str) -> ModelT:
    """Build `model` from `values`.

    Args:
        model: the class to build.
        values: its fields.
        where: what the values describe, the start of each line of the error.

    Raises:
        ValueError: a key is unknown, missing or holds a wrong value; names each such key.
    """
    try:
        return model.model_validate(dict(values))
    except ValidationError as error:
        faults = "\n".join(f"{where}: {_fault(model, detail)}" for detail in error.errors())
        raise ValueError(faults) from error


def _fault(model: type[BaseModel], detail: Mapping[str, Any]) -> str:
    key = ".".join(map(str, detail["loc"]))
    if detail["type"] == "extra_forbidden":
        # Only the top level's fields are known here; a nested table's are not guessed at.
        choices = did_you_mean(key, model.model_fields) if len(detail["loc"]) == 1 else ""
        return f'unknown key "{key}"{choices}'
    if detail["type"] == "missing":
        return f'key "{key}" is missing'
    if not key:  # a validator over the whole model names no key
        return str(detail["msg"])
    return f'key "{key}": {detail["msg"]}, got {detail["input"]!r}'
