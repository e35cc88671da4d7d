"""What makes sampling under speculation right on a CPU.

vLLM's CPU stand-in for `expand_kernel` computes into a copy. And a step in which nothing is verified, as one that reads
a prompt, hands on an empty tensor of top-k, of which its CPU code takes the largest value where no request has a top-p.

Replaces: `vllm.utils.cpu_triton_utils._expand_kernel_impl`, `vllm.v1.sample.rejection_sampler.apply_top_k_top_p`.
Tried with: vLLM 0.32.
No hook: `register_kernels`, which is one, is called by vLLM itself after plugins are loaded; so what it registers then
    is replaced, and it is called again for a process in which that has happened.
Without it: temperature, top-p and top-k of the verified tokens are whatever the memory held, which greedy decoding does
    not read (vllm-project/vllm#55005); and a prompt with a top-k beside none with a top-p ends the engine.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from vllm.platforms import current_platform
from vllm.triton_utils.dispatcher import register_kernels
from vllm.utils import cpu_triton_utils
from vllm.v1.sample import rejection_sampler

from models.engines.vllm.patches import replace

NAME = "vllm.v1.sample.rejection_sampler.expand_kernel"


def install() -> None:
    """Put both in place, on CPUs only."""
    if current_platform.is_cpu():
        stand_ins: Any = cpu_triton_utils
        stand_ins._expand_kernel_impl = expand
        register_kernels({NAME: expand})
        replace(rejection_sampler, "apply_top_k_top_p", constrain_rows)


def expand(
    output: Tensor, values: Tensor, ends: Tensor, replace_from: int, replace_to: int, MAX_NUM_TOKENS: int | None = None
) -> None:
    """Repeat each request's value over its drafted tokens, in place.

    Args:
        output: [num_tokens] written.
        values: [B] one a request.
        ends: [B] cumulative number of drafted tokens.
        replace_from: a value that is written as `replace_to`.
        replace_to: see there.
        MAX_NUM_TOKENS: a bound that the compiled kernel needs; the name is the caller's.
    """
    counts = torch.diff(ends.to(torch.int64), prepend=ends.new_zeros(1, dtype=torch.int64))
    replaced = torch.where(values == replace_from, torch.full_like(values, replace_to), values)
    output.copy_(torch.repeat_interleave(replaced, counts))


def constrain_rows(own: Callable[..., Tensor], logits: Tensor, *limits: Tensor | None) -> Tensor:
    """Leave logits [num_tokens, V] of no tokens alone, and do as vLLM with others."""
    return own(logits, *limits) if len(logits) else logits
