"""Which weights the products of processors without AVX-512 take; the engine computes with them in test_vllm_*.py."""

import pytest
import torch

from models.engines.vllm import linear_kernels


def test_only_weights_that_float16_holds_are_read_as_float16() -> None:
    rng = torch.Generator().manual_seed(0)
    weight = torch.randn(64, 64, generator=rng) * torch.logspace(-9, 4, 64)  # from below float16's steps to its end
    assert linear_kernels.fits_half(weight.bfloat16().float())
    assert not linear_kernels.fits_half(weight)
    assert not linear_kernels.fits_half((10 * weight).bfloat16().float())
    assert not linear_kernels.fits_half(weight.bfloat16())


def test_weights_that_this_processor_would_saturate_are_refused() -> None:
    linear_kernels.require_unsaturated(torch.tensor([[63, -63]], dtype=torch.int8))
    with pytest.raises(ValueError, match=r"weights go up to 128, .* beyond 63; .*weight_bits = 7"):
        linear_kernels.require_unsaturated(torch.tensor([[63, -128]], dtype=torch.int8))
