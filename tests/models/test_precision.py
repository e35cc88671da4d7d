"""The number format that an engine computes in, and what there is to compute on."""

import pytest
import torch

from models.core.learning import distill
from models.engines.vllm import Params
from models.params import validate
from models.precision import engine_dtype, fast_dtype, gpu_name, is_out_of_memory, require_device


def test_the_engines_number_format_is_told_by_name() -> None:
    assert engine_dtype(Params(dtype="bfloat16"), "cpu") == "bfloat16"
    assert engine_dtype(Params(), "cpu") in ("float32", "bfloat16")


def test_a_device_that_is_not_here_is_refused_with_those_that_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    require_device("cpu")
    with pytest.raises(ValueError, match="^device cuda is not here; torch sees cpu$"):
        require_device("cuda")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for device in ("cpu", "cuda", "cuda:1"):
        require_device(device)
    with pytest.raises(ValueError, match="^device cuda:2 is not here; torch sees cpu, cuda:0, cuda:1$"):
        require_device("cuda:2")


def test_a_recipe_names_one_of_several_gpus_and_nothing_else() -> None:
    assert distill.Params().device == ""
    assert distill.Params(device="cuda:1").device == "cuda:1"
    with pytest.raises(ValueError, match="device"):
        validate(distill.Params, {"device": "gpu1"}, "distill")


def test_one_of_several_gpus_is_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"name of {device}")
    assert fast_dtype("cuda:1") == torch.bfloat16
    assert (gpu_name("cuda:1"), gpu_name("cpu")) == ("name of cuda:1", "")


@pytest.mark.parametrize(
    ("error", "ran_out"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("shapes differ"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_memory_that_ran_out_is_told_from_other_errors(error: Exception, ran_out: bool) -> None:
    assert is_out_of_memory(error) is ran_out
