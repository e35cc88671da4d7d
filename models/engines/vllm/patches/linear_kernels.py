"""Linear layers on CPUs where vLLM's own products are missing, slow or wrong, most of all without AVX-512.

**Floats.** Without AVX-512 FBGEMM multiplies by weights that float16 holds (`models/core/layers/kernels.py`);
others stay with oneDNN.

**8 bits.** Where a processor lacks the instructions (VNNI), oneDNN adds pairs of 8-bit products in 16 bits, which
saturate: 127·127 + 127·127 comes out as 255. Layers are off by tenths without a word. Weights from −63 to 63 can't
saturate, so those are taken and others are refused, by what the product does and not by the processor's name. FBGEMM
has the same limit and is several times faster, so it multiplies.

**4 bits.** vLLM's product of packed 4-bit weights (`cpu_gemm_wna16`) knows no float32, and a build for processors
without AVX-512 has none: loading succeeds and the first request fails. There the weights are unpacked as they are
loaded; they take a float's memory then, and compute exactly what the packed ones would.

FBGEMM multiplies floats of 32 bits, and its packed weights are no tensors that `torch.compile` could trace: an engine
in bfloat16 and a compiled one keep oneDNN's products.

**Row counts.** oneDNN prepares a product anew for each number of rows, and vLLM keeps 32 of them a float layer. Steps
that read prompts, and verify what was drafted, have many more. What was kept no longer took a step's linear layers 4 to
8 ms more of 45 to 140 (SmolLM2-135M in bfloat16, two cores of an AMD EPYC), so more are kept. Layers of one shape share
most of what they hold.

Replaces: `vllm._custom_ops.create_onednn_mm`, `vllm.model_executor.layers.utils.dispatch_cpu_unquantized_gemm`,
    `vllm.model_executor.kernels.linear.scaled_mm.cpu.CPUInt8ScaledMMLinearKernel.process_weights_after_loading`,
    `vllm.model_executor.kernels.linear.mixed_precision.cpu.CPUWNA16LinearKernel.process_weights_after_loading`,
    `vllm.model_executor.kernels.linear.mixed_precision.cpu.CPUWNA16LinearKernel.apply_weights`.
Tried with: vLLM 0.32.
No hook: vLLM chooses a linear kernel from lists of its own.
Without it: on processors without AVX-512 floats are multiplied more slowly, 8-bit layers are off by tenths, and 4-bit
    targets fail at the first request; elsewhere steps of changing sizes take longer.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from vllm import _custom_ops as ops
from vllm.config import get_current_vllm_config
from vllm.model_executor.kernels.linear.mixed_precision.cpu import CPUWNA16LinearKernel
from vllm.model_executor.kernels.linear.scaled_mm.cpu import CPUInt8ScaledMMLinearKernel
from vllm.model_executor.layers import utils
from vllm.platforms import current_platform

from models.core.layers import integers
from models.core.layers.integers import Integers, token_scales
from models.core.layers.kernels import Product, fits_half, half_is_faster, half_product
from models.engines.vllm.patches import replace

fbgemm = torch.ops.quantized

UNSATURATED = 63
UINT8_ZERO = 128  # FBGEMM's inputs are unsigned
# That a layer keeps. Of 7,500 steps with 1 to 64 sequences, 4% had a number of rows that was not among the last 256.
NUM_ROW_COUNTS = 256


def install() -> None:
    """Replace the kernels' methods, on CPUs only."""
    if not current_platform.is_cpu():
        return
    replace(ops, "create_onednn_mm", _create)
    if half_is_faster():
        replace(utils, "dispatch_cpu_unquantized_gemm", _dispatch)
    if saturates():
        replace(CPUInt8ScaledMMLinearKernel, "process_weights_after_loading", _check)
    replace(CPUWNA16LinearKernel, "process_weights_after_loading", _prepare)
    replace(CPUWNA16LinearKernel, "apply_weights", _multiply)


@cache
def saturates() -> bool:
    """Whether this machine's product of 8-bit integers is wrong for large ones."""
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


def _create(own: Callable[..., Any], weight: Tensor, primitive_cache_size: int = NUM_ROW_COUNTS) -> Any:
    return own(weight, max(primitive_cache_size, NUM_ROW_COUNTS))


def _takes_packed() -> bool:
    """Whether the engine that is being started computes in float32 and without `torch.compile`."""
    config = get_current_vllm_config().model_config
    return bool(config.enforce_eager) and config.dtype == torch.float32


def _dispatch(own: Callable[..., None], layer: Any, remove_weight: bool) -> None:
    weight = layer.weight
    if weight.is_meta or not _takes_packed() or not fits_half(weight):
        own(layer, remove_weight)
        return
    product = half_product(weight)
    layer.cpu_linear = lambda x, _, bias: product(x, bias)
    if remove_weight:
        layer.weight = nn.Parameter(weight.new_empty(0), requires_grad=False)


def _check(own: Callable[..., None], kernel: Any, layer: nn.Module) -> None:
    weight = getattr(layer, kernel.layer_param_names[0]).detach().clone()
    require_unsaturated(weight)
    own(kernel, layer)
    if _takes_packed() and (kernel.config.input_symmetric or kernel.config.is_static_input_scheme):
        kernel.dnnl_handler = None  # vLLM's packed copy; what it prepared else is used
        product = _int8_product(kernel, layer, weight)
        kernel.linear_method = lambda _, x, bias: product(x, bias)


def _int8_product(kernel: CPUInt8ScaledMMLinearKernel, layer: nn.Module, weight: Tensor) -> Product:
    """Return the product with int8 weights [O, I] whose scales vLLM has prepared; inputs are rounded as vLLM does."""
    _, scales, input_scale, input_zero, _ = kernel._get_layer_params(layer)
    scales = scales.detach().double().flatten().expand(len(weight))
    zeros = torch.zeros(len(weight), dtype=torch.int64)
    packed = fbgemm.linear_prepack(torch._make_per_channel_quantized_tensor(weight, scales, zeros, 0), None)
    zero = UINT8_ZERO + (0 if input_zero is None else int(input_zero))

    def multiply(x: Tensor, bias: Tensor | None = None) -> Tensor:
        scale = token_scales(x) if input_scale is None else input_scale
        # Rounded here: FBGEMM adds its zero first, which rounds ties the other way.
        steps = (x * scale.reciprocal()).round()
        output: Tensor = fbgemm.linear_with_input_q_dq_qweight_dq_output_fp32(steps, 1.0, zero, packed) * scale
        return output if bias is None else output + bias

    return multiply


def _prepare(own: Callable[..., None], kernel: Any, layer: nn.Module) -> None:
    if hasattr(torch.ops._C, "cpu_gemm_wna16") and kernel.config.act_type != torch.float32:
        own(kernel, layer)
    else:
        _unpack(kernel, layer)


def _multiply(own: Callable[..., Tensor], kernel: Any, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
    if not hasattr(layer, "redraft_unpacked"):
        return own(kernel, layer, x, bias)
    output: Tensor = layer.redraft_unpacked.cpu_linear(x, layer.redraft_unpacked.weight, bias)
    return output


def _unpack(kernel: Any, layer: nn.Module) -> None:
    packed, scales = getattr(layer, kernel.w_q_name), getattr(layer, kernel.w_s_name)
    if packed.input_dim != 1:
        raise ValueError(
            "where 4-bit weights have to be unpacked (float32, or no AVX-512), they are served from compressed-tensors "
            "checkpoints, not from GPTQ's or AWQ's"
        )
    bits = kernel.config.weight_type.size_bits
    zeros = None
    if kernel.config.zero_points:
        zeros = integers.unpack(getattr(layer, kernel.w_zp_name).data.T, bits, len(packed)).T
    values = integers.unpack(packed.data, bits, kernel.config.partition_weight_shape[0])
    weight = Integers(values, scales.data, zeros).floats().to(scales.dtype)
    setattr(layer, kernel.w_q_name, nn.Parameter(weight.new_empty(0), requires_grad=False))
    layer.redraft_unpacked = nn.Module()
    layer.redraft_unpacked.weight = nn.Parameter(weight, requires_grad=False)
    utils.dispatch_cpu_unquantized_gemm(layer.redraft_unpacked, remove_weight=True)
