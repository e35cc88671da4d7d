"""What multiplies on this machine, and which number format is fast there.

On a CPU without bfloat16 units a bfloat16 product is emulated and up to seven times slower than a float32 one, so the
choice follows the processor.
"""

import torch

from models.params import BaseParams


def gpu_name(device: str) -> str:
    """Return the name of the GPU that computes, "" on a CPU."""
    return torch.cuda.get_device_name(device) if device.startswith("cuda") else ""


def require_device(device: str) -> None:
    """Raise ValueError if torch sees no such device here; names those that it sees."""
    seen = ["cpu", *(f"cuda:{number}" for number in range(torch.cuda.device_count()))]
    if device not in seen and (device != "cuda" or len(seen) == 1):
        raise ValueError(f"device {device} is not here; torch sees {', '.join(seen)}")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory of a device ran out, as torch or a library under it says it."""
    return isinstance(error, RuntimeError) and "out of memory" in str(error).lower()


def fast_dtype(device: str = "cpu") -> torch.dtype:
    """Return bfloat16 where the device multiplies it natively, else float32."""
    if device.startswith("cuda"):
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float32
    native = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return torch.bfloat16 if native else torch.float32


def engine_dtype(engine: BaseParams, device: str) -> str:
    """Return the number format that an engine computes in, as torch names it."""
    dtype = str(getattr(engine, "dtype", "auto"))
    return str(fast_dtype(device)).removeprefix("torch.") if dtype == "auto" else dtype
