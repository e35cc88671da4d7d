"""Quantized linear layers on CPUs that vLLM's own kernels leave out.

A build for processors without AVX-512 has no product for packed 4-bit weights (`cpu_gemm_wna16`): loading succeeds and
the first request fails. There the weights are unpacked as they are loaded; they take a float's memory then, and compute
exactly what the packed ones would.

Where a processor lacks the instructions (VNNI), oneDNN adds pairs of 8-bit products in 16 bits, which saturate:
127·127 + 127·127 comes out as 255. Layers are off by tenths without a word. Weights from −63 to 63 can't saturate, so
those are taken and others are refused, by what the product does and not by the processor's name.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from models.layers import integers
from models.layers.integers import Integers

UNSATURATED = 63


def install() -> None:
    """Replace the kernels' methods, on CPUs only; the worker does so as it imports its extension."""
    from vllm.model_executor.kernels.linear.mixed_precision.cpu import CPUWNA16LinearKernel
    from vllm.model_executor.kernels.linear.scaled_mm.cpu import CPUInt8ScaledMMLinearKernel
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    if not hasattr(torch.ops._C, "cpu_gemm_wna16"):
        CPUWNA16LinearKernel.process_weights_after_loading = _unpack  # type: ignore[method-assign]
        CPUWNA16LinearKernel.apply_weights = _multiply  # type: ignore[method-assign]
    if saturates():
        prepare = CPUInt8ScaledMMLinearKernel.process_weights_after_loading

        def checked(kernel: Any, layer: nn.Module) -> None:
            require_unsaturated(getattr(layer, kernel.layer_param_names[0]))
            prepare(kernel, layer)

        CPUInt8ScaledMMLinearKernel.process_weights_after_loading = checked  # type: ignore[method-assign]


@cache
def saturates() -> bool:
    """Whether this machine's product of 8-bit integers is wrong for large ones."""
    from vllm import _custom_ops as ops

    left, right = (torch.full((rows, 64), 127, dtype=torch.int8) for rows in (1, 32))
    handle = ops.create_onednn_scaled_mm(right.t(), torch.ones(32, 1), torch.float32, False, False, 1)
    outputs = torch.empty(1, 32)
    ops.onednn_scaled_mm(handle, left, outputs, torch.ones(1), None, None, None)
    return bool((outputs != 64 * 127 * 127).any())


def require_unsaturated(weight: Tensor) -> None:
    """Raise ValueError if int8 weights are larger than this machine multiplies rightly; see the module."""
    most = int(weight.to(torch.int16).abs().max())
    if most > UNSATURATED:
        raise ValueError(
            f"int8 weights go up to {most}, and this processor's 8-bit products saturate beyond {UNSATURATED}; "
            "quantize the target with weight_bits = 7"
        )


def _unpack(kernel: Any, layer: nn.Module) -> None:
    """Put the float weight [O, I] in place of the packed one."""
    packed, scales = getattr(layer, kernel.w_q_name), getattr(layer, kernel.w_s_name)
    if packed.input_dim != 1:
        raise ValueError(
            "this processor serves 4-bit weights of compressed-tensors checkpoints, not of GPTQ's or AWQ's"
        )
    bits = kernel.config.weight_type.size_bits
    zeros = None
    if kernel.config.zero_points:
        zeros = integers.unpack(getattr(layer, kernel.w_zp_name).data.T, bits, len(packed)).T
    values = integers.unpack(packed.data, bits, kernel.config.partition_weight_shape[0])
    weight = Integers(values, scales.data, zeros).floats().to(scales.dtype)
    setattr(layer, kernel.w_q_name, nn.Parameter(weight, requires_grad=False))


def _multiply(kernel: Any, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
    return nn.functional.linear(x, getattr(layer, kernel.w_q_name), bias)
