"""What makes sampling under speculation right on a CPU.

vLLM 0.32's CPU stand-in for `expand_kernel` computes into a copy, so temperature, top-p and top-k of the verified
tokens are whatever the memory held (vllm-project/vllm#55005). Greedy decoding does not read them, which is how it goes
unseen.

A step in which nothing is verified, as one that reads a prompt, hands on an empty tensor of top-k, and where no request
has a top-p, its CPU code then takes the largest value of none: that ends the engine.
"""

from collections.abc import Callable
from functools import wraps

import torch
from torch import Tensor

NAME = "vllm.v1.sample.rejection_sampler.expand_kernel"


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


def on_rows(constrain: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return what leaves logits [num_tokens, V] of no tokens alone, and does as `constrain` with others."""

    @wraps(constrain)
    def constrained(logits: Tensor, *limits: Tensor | None) -> Tensor:
        return constrain(logits, *limits) if len(logits) else logits

    return constrained


def install() -> None:
    """Put both in place, on CPUs only. The worker does so as it imports its extension; a plugin runs too early."""
    from vllm.platforms import current_platform
    from vllm.triton_utils.dispatcher import register_kernels
    from vllm.v1.sample import rejection_sampler
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

    if current_platform.is_cpu():
        register_kernels({NAME: expand})
        # The module calls it by this name, which it imported and doesn't export.
        rejection_sampler.apply_top_k_top_p = on_rows(apply_top_k_top_p)  # type: ignore[attr-defined]
