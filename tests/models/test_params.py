"""Settings are frozen and an error names the key at fault."""

from typing import Literal

import pytest
from pydantic import Field, field_validator

from models.params import BaseParams, validate


class Params(BaseParams):
    """A method's settings for these tests."""

    name: Literal["example"] = "example"
    learning_rate: float = Field(1e-3, gt=0)
    path: str


def test_right_values_build_the_params() -> None:
    assert validate(Params, {"path": "x"}, "family.example") == Params(path="x")


def test_a_misspelt_key_is_named_with_the_nearest_one() -> None:
    with pytest.raises(
        ValueError, match=r'family\.example: unknown key "learnig_rate" \(did you mean "learning_rate"\?\)'
    ):
        validate(Params, {"path": "x", "learnig_rate": 1.0}, "family.example")


def test_each_fault_has_its_own_line() -> None:
    with pytest.raises(ValueError) as caught:
        validate(Params, {"learning_rate": -1.0}, "family.example")
    lines = str(caught.value).splitlines()
    assert len(lines) == 2
    assert 'key "learning_rate": Input should be greater than 0, got -1.0' in lines[0]
    assert 'key "path" is missing' in lines[1]


def test_params_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="frozen"):
        Params(path="x").path = "y"


class Checked(BaseParams):
    name: Literal["checked"] = "checked"
    even: int = 0

    @field_validator("even")
    @classmethod
    def _is_even(cls, even: int) -> int:
        if even % 2:
            raise ValueError(f"wanted an even number, got {even}")
        return even


def test_what_our_own_checks_say_is_told_in_their_words() -> None:
    with pytest.raises(ValueError, match=r'^family.checked: key "even": wanted an even number, got 3$'):
        validate(Checked, {"even": 3}, "family.checked")
