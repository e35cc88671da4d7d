"""What multiplies on this machine, and which number format is fast there.

On a CPU without bfloat16 units a bfloat16 product is emulated and up to seven times slower than a float32 one, so the
choice follows the processor.
"""

import torch

from models.params import BaseParams


def gpu_name(device: str) -> str:
    """Return the name of the GPU that computes, "" on a CPU."""
    return torch.cuda.get_device_name() if device == "cuda" else ""


def fast_dtype(device: str = "cpu") -> torch.dtype:
    """Return bfloat16 where the device multiplies it natively, else float32."""
    if device == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float32
    native = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return torch.bfloat16 if native else torch.float32


def engine_dtype(engine: BaseParams, device: str) -> str:
    """Return the number format that an engine computes in, as torch names it."""
    dtype = str(getattr(engine, "dtype", "auto"))
    return str(fast_dtype(device)).removeprefix("torch.") if dtype == "auto" else dtype
