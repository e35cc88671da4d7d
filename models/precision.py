"""Which number format is fast on this machine.

On a CPU without bfloat16 units a bfloat16 product is emulated and up to seven times slower than a float32 one, so the
choice follows the processor.
"""

import torch


def fast_dtype(device: str = "cpu") -> torch.dtype:
    """Return bfloat16 where the device multiplies it natively, else float32."""
    if device == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float32
    native = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return torch.bfloat16 if native else torch.float32
