"""What makes sampling under speculation right on a CPU; vLLM's stand-in for `expand_kernel` computes into a copy.

Without it temperature, top-p and top-k of the verified tokens are whatever the memory held, which greedy decoding does
not read (vllm-project/vllm#55005).
"""

from typing import Any

import torch
from torch import Tensor

NAME = "vllm.v1.sample.rejection_sampler.expand_kernel"


def install() -> bool:
    """Put the kernel in place, on CPUs only; return whether it was.

    vLLM registers its own after plugins are loaded, and again for each process, so its implementation is replaced too.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return False
    from vllm.triton_utils.dispatcher import register_kernels
    from vllm.utils import cpu_triton_utils

    stand_ins: Any = cpu_triton_utils
    stand_ins._expand_kernel_impl = expand
    register_kernels({NAME: expand})
    return True


def expand(
    output: Tensor, values: Tensor, ends: Tensor, replace_from: int, replace_to: int, MAX_NUM_TOKENS: int | None = None
) -> None:
    """Write each request's value [B] over its drafted tokens, of which `ends` [B] is the cumulative number.

    `output` is [num_tokens]. The compiled kernel needs the bound MAX_NUM_TOKENS; its name is the caller's.
    """
    counts = torch.diff(ends.to(torch.int64), prepend=ends.new_zeros(1, dtype=torch.int64))
    replaced = torch.where(values == replace_from, torch.full_like(values, replace_to), values)
    output.copy_(torch.repeat_interleave(replaced, counts))
