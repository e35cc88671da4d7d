"""Which integers the products of processors without VNNI take; the engine computes with them in test_vllm_*.py."""

import pytest
import torch

from models.engines.vllm import linear_kernels


def test_weights_that_this_processor_would_saturate_are_refused() -> None:
    linear_kernels.require_unsaturated(torch.tensor([[63, -63]], dtype=torch.int8))
    with pytest.raises(ValueError, match=r"weights go up to 128, .* beyond 63; .*weight_bits = 7"):
        linear_kernels.require_unsaturated(torch.tensor([[63, -128]], dtype=torch.int8))
