import json
from pathlib import Path

import pytest

from models.engines.vllm import Params
from models.engines.vllm.measuring import Times, mode_of

HOLDS = {True: "here, eager", False: "here, compiled"}
UNKNOWN = Times(None, HOLDS)


def target(folder: Path, **config: object) -> Path:
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **config}))
    return folder


@pytest.mark.parametrize(
    ("serves", "dtype", "quantized", "eager"),
    [
        (True, "bfloat16", False, False),
        (True, "float32", False, False),
        (True, "bfloat16", True, False),
        (True, "float32", True, True),
        (False, "bfloat16", False, True),
    ],
)
def test_what_serves_is_compiled_unless_its_packed_weights_need_eager_products(
    tmp_path: Path, serves: bool, dtype: str, quantized: bool, eager: bool
) -> None:
    directory = target(
        tmp_path, **({"quantization_config": {"quant_method": "compressed-tensors"}} if quantized else {})
    )
    assert mode_of(Params(), directory, dtype, serves, UNKNOWN).eager is eager


@pytest.mark.parametrize("eager", [True, False])
def test_a_recipe_decides_where_it_says_so(tmp_path: Path, eager: bool) -> None:
    for serves in (True, False):
        mode = mode_of(Params(enforce_eager=eager), target(tmp_path), "bfloat16", serves, UNKNOWN)
        assert mode.eager is eager
        assert str(mode) == f"{'eager' if eager else 'compiled'}: [engine] enforce_eager says so"


@pytest.mark.parametrize(
    ("eager_ms", "compiled_ms", "eager", "why"),
    [
        (21.0, 13.5, False, "a plain step takes 13.5 ms here, 21.0 eager"),
        (13.5, 21.0, True, "a plain step takes 13.5 ms here, 21.0 compiled"),
        (
            13.5,
            None,
            False,
            "compiled steps were faster wherever both were tried; here they were not both measured yet",
        ),
    ],
)
def test_what_serves_runs_as_was_faster_here(
    tmp_path: Path, eager_ms: float, compiled_ms: float | None, eager: bool, why: str
) -> None:
    times = Times(tmp_path / "costs", HOLDS)
    for of_eager, ms in ((True, eager_ms), (False, compiled_ms)):
        if ms is not None:
            times.keep(of_eager, ms)
    later = Times(tmp_path / "costs", HOLDS)
    mode = mode_of(Params(), target(tmp_path), "bfloat16", True, later)
    assert mode == (eager, why)
    assert mode_of(Params(), target(tmp_path), "bfloat16", False, later).eager


@pytest.mark.parametrize("content", ["", '{"measured_for": "elsewhere", "plain_ms": 1}', '{"plain_ms": -1}'])
def test_a_time_of_another_machine_and_a_torn_one_are_measured_anew(tmp_path: Path, content: str) -> None:
    times = Times(tmp_path, HOLDS)
    times.keep(True, 13.5)
    (file,) = tmp_path.iterdir()
    file.write_text(content)
    assert times.plain_ms(eager=True) is None
