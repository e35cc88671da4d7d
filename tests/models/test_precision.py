"""The number format that an engine computes in."""

from models.engines.vllm import Params
from models.precision import engine_dtype


def test_the_engines_number_format_is_told_by_name() -> None:
    assert engine_dtype(Params(dtype="bfloat16"), "cpu") == "bfloat16"
    assert engine_dtype(Params(), "cpu") in ("float32", "bfloat16")
