"""The base of every method's settings, and errors that name the key at fault.

`validate` turns pydantic's report into a plain `ValueError` of one line a fault, because it is read by whoever wrote
the recipe, who has not seen the class.
"""

import os
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from typing import Annotated, Any, TypeVar, get_args, get_origin

from pydantic import AfterValidator, BaseModel, Field, ValidationError, model_validator
from pydantic_core import to_jsonable_python

from models.types import Frozen

ModelT = TypeVar("ModelT", bound=BaseModel)


class BaseParams(Frozen):
    """Settings of one method; a subclass sets `name` to a literal of its file's name."""

    name: str


class TrainingParams(Frozen):
    """Settings of the training loop of language models, `models.core.learning.training`.

    Attributes:
        learning_rate: of AdamW, at its highest.
        weight_decay: of AdamW.
        max_grad_norm: gradients are clipped to this norm.
        num_epochs: passes over the documents.
        batch_tokens: tokens, padding included, of one optimizer step.
        max_length: longer documents are cut into pieces of this length.
        warmup: share of the steps in which the learning rate rises.
        checkpoint_s: seconds between checkpoints.
    """

    learning_rate: float = Field(1e-3, gt=0)
    warmup: float = Field(0.05, ge=0, lt=1)
    weight_decay: float = Field(0.01, ge=0)
    num_epochs: int = Field(1, ge=1)
    batch_tokens: int = Field(2048, ge=2)
    max_length: int = Field(256, ge=2)
    max_grad_norm: float = Field(1.0, gt=0)
    checkpoint_s: float = Field(30.0, gt=0)


# A path, or another name of what it is to be found by; "~" is the user's home.
LocalPath = Annotated[str, AfterValidator(os.path.expanduser)]


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """Return the end of an error message: the nearest choice, if one is near, and all of them."""
    choices = sorted(choices)
    near = get_close_matches(word, choices, n=1)
    hint = f' (did you mean "{near[0]}"?)' if near else ""
    return f"{hint}; there are: {', '.join(choices) or 'none'}"


def validate(model: type[ModelT], values: Mapping[str, Any], where: str, wrong_first: bool = False) -> ModelT:
    """Build `model` from `values`; ValueError names each key at fault in a line that starts with `where`.

    With `wrong_first` it names what is missing only where nothing is wrong: a wrong name may be what is missing.
    """
    try:
        return model.model_validate(dict(values))
    except ValidationError as error:
        details = error.errors()
        if wrong_first:
            details = [detail for detail in details if detail["type"] != "missing"] or details
        raise ValueError("\n".join(f"{where}: {_fault(model, detail)}" for detail in details)) from error


def without_defaults(value: Any) -> Any:
    """Return settings as JSON, without keys that have their defaults; the name of a method stays."""
    if isinstance(value, BaseModel):
        return {key: without_defaults(told) for key, told in value if key == "name" or told != _default(value, key)}
    if isinstance(value, Mapping):
        return {key: without_defaults(told) for key, told in value.items()}
    if isinstance(value, list | tuple):
        return [without_defaults(one) for one in value]
    return to_jsonable_python(value)


def require_unsaid(params: BaseModel, keys: Iterable[str], where: str, why: str) -> None:
    """Raise ValueError naming one of `keys`, which nothing would read, that is not set to its default."""
    for key in keys:
        if (value := getattr(params, key)) != _default(params, key):
            raise ValueError(f'{where}: key "{key}" would do nothing, since {why}; got {value!r}')


def unread(*keys: str, when: Callable[[Any], bool], why: str) -> Any:
    """Return a validator of a method's settings that refuses `keys` when nothing reads them; see `require_unsaid`."""

    def check(params: BaseParams) -> BaseParams:
        if when(params):
            require_unsaid(params, keys, params.name, why)
        return params

    return model_validator(mode="after")(check)


def _default(params: BaseModel, key: str) -> Any:
    return type(params).model_fields[key].get_default(call_default_factory=True)


def _fault(model: type[BaseModel], detail: Mapping[str, Any]) -> str:
    key = ".".join(map(str, detail["loc"]))
    if detail["type"] == "extra_forbidden":
        *path, last = map(str, detail["loc"])
        owner = _table_at(model, path)
        return f'unknown key "{key}"{did_you_mean(last, owner.model_fields) if owner else ""}'
    if detail["type"] == "missing":
        return f'key "{key}" is missing'
    if detail["type"] == "model_type":
        return f'key "{key}": wanted a table, got {detail["input"]!r}'
    if detail["type"] == "value_error":  # one of ours, which says what came
        said = str(detail["ctx"]["error"])
        return f'key "{key}": {said}' if key else said  # a validator over the whole model names no key
    return f'key "{key}": {detail["msg"]}, got {detail["input"]!r}'


def _table_at(model: type[BaseModel], path: Iterable[str]) -> type[BaseModel] | None:
    """Return the class of a table inside of `model`'s; None where the path leads through something else."""
    found: Any = model
    for key in path:
        if get_origin(found) is dict:  # of tables by their names
            found = get_args(found)[1]
        else:
            field = getattr(found, "model_fields", {}).get(key)
            kinds = (field.annotation, *get_args(field.annotation)) if field else ()  # it may be optional
            found = next((kind for kind in kinds if get_origin(kind) is dict or hasattr(kind, "model_fields")), None)
    return found if hasattr(found, "model_fields") else None
