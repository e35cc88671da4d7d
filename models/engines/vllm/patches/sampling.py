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

from torch import Tensor
from vllm.v1.sample import rejection_sampler

from models.engines.vllm.patches import replace
from models.engines.vllm.redraft_vllm import sampling


def install() -> None:
    """Put both in place, on CPUs only."""
    if sampling.install():
        replace(rejection_sampler, "apply_top_k_top_p", constrain_rows)


def constrain_rows(own: Callable[..., Tensor], logits: Tensor, *limits: Tensor | None) -> Tensor:
    """Leave logits [num_tokens, V] of no tokens alone, and do as vLLM with others."""
    return own(logits, *limits) if len(logits) else logits
