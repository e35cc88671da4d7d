"""The base of every method's settings, and errors that name the key at fault.

`validate` turns pydantic's report into a plain `ValueError` of one line a fault, because it is read by whoever wrote
the recipe, who has not seen the class.
"""

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

ModelT = TypeVar("ModelT", bound=BaseModel)


class Frozen(BaseModel):
    """A value: can't be changed, takes no unknown key."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class BaseParams(Frozen):
    """Settings of one method; a subclass sets `name` to a literal of its file's name."""

    name: str


class TrainingParams(Frozen):
    """Settings of the training loop of language models, `models.training`.

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
    if detail["type"] == "value_error":  # one of ours, which says what came
        said = str(detail["ctx"]["error"])
        return f'key "{key}": {said}' if key else said  # a validator over the whole model names no key
    return f'key "{key}": {detail["msg"]}, got {detail["input"]!r}'
