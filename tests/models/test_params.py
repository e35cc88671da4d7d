"""Settings are frozen and an error names the key at fault."""

from typing import Literal

import pytest
from pydantic import Field, field_validator

from models import catalog
from models.params import BaseParams, validate


class Params(BaseParams):
    """A method's settings for these tests."""

    name: Literal["example"] = "example"
    learning_rate: float = Field(1e-3, gt=0)
    path: str


def test_right_values_build_params_that_cannot_be_changed() -> None:
    assert validate(Params, {"path": "x"}, "family.example") == Params(path="x")
    with pytest.raises(ValueError, match="frozen"):
        Params(path="x").path = "y"


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


@pytest.mark.parametrize(
    ("method", "settings", "fault"),
    [
        ("lengths.specdec_pp", {"threshold": 1.1}, 'key "threshold"'),
        *(("regimes.dorefa", {"weight_bits": bits}, 'key "weight_bits"') for bits in (0, 17, 31, 33)),
        ("regimes.hybrid_bfp", {"mantissa_bits": 12, "wide_bits": 8}, "wide_bits must be .* mantissa_bits, 12; got 8"),
        ("regimes.hybrid_bfp", {"mantissa_bits": 24}, 'key "mantissa_bits"'),
        ("regimes.iterative_magnitude", {"num_rounds": 0}, 'key "num_rounds"'),
        ("regimes.layer_skip_gate", {"floor": 0}, 'key "floor"'),
        ("regimes.lognormal_gradient", {"num_bits": 20}, "num_bits must be 2 to 16, or 32 .*; got 20"),
        ("regimes.lognormal_gradient", {"num_bits": 4, "exponent_bits": 4}, "exponent_bits .* num_bits, 4; got 4"),
        ("regimes.lognormal_gradient", {"sparsity": 1.0}, 'key "sparsity"'),
        ("regimes.minibatch_drop", {"probability": 1}, 'key "probability"'),
        ("regimes.predictive_sign_gradient", {"activation_msb": 9}, "activation_msb .* activation_bits, 8; got 9"),
        ("trees.dyspec", {"threshold": 1.0}, 'key "threshold"'),
        ("trees.sequoia", {"acceptance": (0.7, 0.5)}, r".*sum to at most 1; they sum to 1\.2"),
        *(("trees.static", {"widths": widths}, 'key "widths') for widths in ((), (2, 0))),
        ("verify.judge", {"threshold": -0.1}, 'key "threshold"'),
        ("verify.knowledge_transfer", {"alpha": 1.1}, 'key "alpha"'),
        ("verify.knowledge_transfer", {"eta": -1}, 'key "eta"'),
        ("verify.momentum", {"alpha": -0.1}, 'key "alpha"'),
        *(("verify.typical", {"epsilon": epsilon}, 'key "epsilon"') for epsilon in (0, 1.1)),
        ("verify.typical", {"delta": 0}, 'key "delta"'),
    ],
)
def test_a_methods_setting_that_is_out_of_its_range_is_refused(method: str, settings: dict, fault: str) -> None:
    family, name = method.split(".")
    with pytest.raises(ValueError, match=f"{method}: {fault}"):
        catalog.parse(family, {"name": name, **settings})


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
