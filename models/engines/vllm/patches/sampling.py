"""Draws what is sampled by noise that draft and target share, and makes sampling under speculation right on a CPU.

A token is argmax (logit / temperature + g), where g is Gumbel noise that is a function of the request's seed, the
token's position and the token. Drafted tokens are kept while the target draws the same by that noise. So an answer is a
function of its seed and the target's logits: no draft, K or look-up changes it, and nothing of q is needed to verify
(arXiv:2408.07978; `models/verify/coupled.py` has the law). A request without a seed gets one of its own. Greedy rows
have no noise.

vLLM's CPU stand-in for `expand_kernel` computes into a copy. For a top-p it sorts each row, 2.5 ms of 49,152 tokens;
what is kept is found here in 0.08. It verifies a greedy step by copies of all logits, 0.24 ms of four rows, and here in
0.08. And a step in which nothing is verified, as one that reads a prompt, hands on an empty tensor of top-k, of which
its CPU code takes the largest value where no request has a top-p.

Replaces: `vllm.utils.cpu_triton_utils._expand_kernel_impl`, `vllm.v1.sample.rejection_sampler.apply_top_k_top_p`,
    `vllm.v1.sample.rejection_sampler.rejection_sample`, `vllm.v1.worker.gpu_model_runner.GPUModelRunner._sample`,
    `vllm.v1.sample.rejection_sampler.RejectionSampler.forward`,
    `vllm.v1.sample.ops.topk_topp_sampler.apply_top_k_top_p`,
    `vllm.v1.sample.ops.topk_topp_sampler.TopKTopPSampler.forward_cpu`,
    `vllm.v1.sample.ops.topk_topp_sampler.TopKTopPSampler.forward_native`.
Tried with: vLLM 0.32.
No hook: `register_kernels`, which is one, is called by vLLM itself after plugins are loaded; so what it registers then
    is replaced, and it is called again for a process in which that has happened. vLLM's sampler gets generators in
    place of seeds, and no positions.
Without it: temperature, top-p and top-k of the verified tokens are whatever the memory held, which greedy decoding does
    not read (vllm-project/vllm#55005); a prompt with a top-k beside none with a top-p ends the engine; and a draft
    changes what a seed draws.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace as replaced
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from vllm.v1.outputs import SamplerOutput
from vllm.v1.sample import rejection_sampler
from vllm.v1.sample.ops import topk_topp_sampler
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from models.engines.vllm import native_build
from models.engines.vllm.patches import replace
from models.engines.vllm.redraft_vllm import sampling

GREEDY = 1e-5  # vLLM's least temperature that draws
SEED = "redraft_seed"  # of a request that came without one
WORD = 0xFFFFFFFF
# Where vLLM's processors of logits keep what a batch's requests ask of them.
IN_USE = {"LogitBiasLogitsProcessor": "biases", "MinTokensLogitsProcessor": "min_toks"}


class Noise(NamedTuple):
    """What the tokens of R rows are drawn by, beside their logits."""

    seeds: Tensor  # [R] int64 of their requests
    positions: Tensor  # [R] int64 of the tokens in their sequences
    temperatures: Tensor  # [R] float32; 0 of greedy rows

    @classmethod
    def of(cls, runner: Any) -> "Noise | None":
        """Return that of the next token of each sequence of a runner's batch; None if all are greedy."""
        batch = runner.input_batch
        temperatures, num = batch.sampling_metadata.temperature, batch.num_reqs
        if batch.sampling_metadata.all_greedy or temperatures is None:
            return None
        seeds = [_seed_of(runner.requests[name]) for name in batch.req_ids]
        positions = torch.from_numpy(batch.num_tokens_no_spec[:num]).long()
        return cls(torch.tensor(seeds).to(temperatures.device), positions.to(temperatures.device), temperatures)

    def after(self, counts: Sequence[int] | Tensor) -> "Noise":
        """Return that of tokens which are so many places later."""
        return self._replace(positions=self.positions + torch.as_tensor(counts).to(self.positions))

    def over(self, counts: Sequence[int]) -> "Noise":
        """Return that of so many tokens in a row for each of these [sum of counts]."""
        lengths = torch.tensor(counts)
        rows = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
        places = torch.arange(len(rows)) - (lengths.cumsum(0) - lengths)[rows]
        return Noise(*(one[rows.to(one.device)] for one in self)).after(places)

    def of_rows(self, places: Sequence[int]) -> "Noise":
        """Return that of some of these rows."""
        return Noise(*(one[torch.tensor(places, device=one.device)] for one in self))

    def draw(self, logits: Tensor, token_ids: Tensor | None = None) -> Tensor:
        """Return the columns [R] that are drawn by logits [R, V], which are not divided by temperatures yet.

        `token_ids` [V] int64 are the target's tokens of the columns, all of them if it is None.
        """
        if token_ids is None:
            token_ids = _all_ids(logits.shape[1], logits.device)
        if logits.device.type == "cpu" and _is_built():
            drawn: Tensor = torch.ops.redraft.draw_by_noise(logits.float(), *self, token_ids)
            return drawn
        return draw_by(logits, *self, token_ids)


def install() -> None:
    """Put all of it in place, what is a CPU's on CPUs only."""
    if sampling.install():
        for module in (rejection_sampler, topk_topp_sampler):
            replace(module, "apply_top_k_top_p", keep_likeliest)
        replace(rejection_sampler.RejectionSampler, "forward", say_likeliest)
    replace(GPUModelRunner, "_sample", sample)
    for name in ("forward_cpu", "forward_native"):
        replace(TopKTopPSampler, name, draw)
    replace(rejection_sampler, "rejection_sample", verify)


def keep_likeliest(own: Callable[..., Tensor], logits: Tensor, k: Tensor | None, p: Tensor | None) -> Tensor:
    """Return logits [R, V] with -inf for what top-k [R] and then top-p [R] leave out, as vLLM does by sorting rows."""
    if not len(logits) or (k is None and p is None):
        return logits
    if logits.dtype != torch.float32 or not logits.is_contiguous() or not _is_built():
        return own(logits, k, p)
    torch.ops.redraft.keep_likeliest(logits, None if k is None else k.long(), p)
    return logits


def say_likeliest(
    own: Callable[..., Any], sampler: Any, verified: Any, q: Tensor | None, logits: Tensor, settings: Any
) -> Any:
    """Verify a step of greedy requests that ask for nothing else by one look at its logits."""
    if sampler.synthetic_mode or not _reads_logits_only(settings):
        return own(sampler, verified, q, logits, settings)
    most, ends = verified.max_spec_len, verified.cu_num_draft_tokens
    said = sampler.sampler.greedy_sample(logits.float())
    last = said[verified.bonus_logits_indices].int()
    emitted = torch.full((len(ends), most + 1), -1, dtype=torch.int32, device=logits.device)
    at_drafted = said[verified.target_logits_indices]
    rejection_sampler._rejection_greedy_sample(
        emitted, ends, verified.draft_token_ids, at_drafted, last, None, most, None, None
    )
    return SamplerOutput(sampled_token_ids=emitted, logprobs_tensors=None)


def sample(own: Callable[..., Any], runner: Any, logits: Tensor | None, verified: Any) -> Any:
    """Hand the step's noise on in the place of vLLM's generators: that of the last token that a sequence may get."""
    if noise := Noise.of(runner):
        ahead = verified.num_draft_tokens if verified is not None else [0] * len(noise.seeds)
        batch = runner.input_batch
        batch.sampling_metadata = replaced(batch.sampling_metadata, generators=noise.after(ahead))
    return own(runner, logits, verified)


def draw(own: Callable[..., Any], sampler: Any, logits: Tensor, noise: Any, *limits: Tensor | None) -> Any:
    """Return tokens [R] of logits [R, V] that are divided by temperatures, and what vLLM returns of the logits."""
    if not isinstance(noise, Noise):  # as while vLLM warms up
        return own(sampler, logits, noise, *limits)
    logits, told = topk_topp_sampler.apply_top_k_top_p(logits, *limits), None
    if sampler.logprobs_mode == "processed_logits":
        told = logits
    elif sampler.logprobs_mode == "processed_logprobs":
        told = logits.log_softmax(dim=-1, dtype=torch.float32)
    return _divided(noise).draw(logits), told


def verify(
    own: Callable[..., Tensor],
    drafted: Tensor,
    counts: list[int],
    most: int,
    ends: Tensor,
    q: Tensor | None,
    logits: Tensor,
    last: Tensor,
    settings: Any,
    **options: Any,
) -> Tensor:
    """Return what a step emits [B, most + 1], -1 behind it: the target's draws while they are the drafted tokens."""
    noise = settings.generators
    if not isinstance(noise, Noise):
        return own(drafted, counts, most, ends, q, logits, last, settings, **options)
    emitted = torch.full((len(counts), most + 1), -1, dtype=torch.int32, device=logits.device)
    said = _divided(noise.after([-count for count in counts]).over(counts)).draw(logits)
    rejection_sampler._rejection_greedy_sample(emitted, ends, drafted, said, last, None, most, None, None)
    return emitted


def draw_by(logits: Tensor, seeds: Tensor, positions: Tensor, temperatures: Tensor, token_ids: Tensor) -> Tensor:
    """Return [R] as `sampling.cpp` does; see `Noise.draw`."""
    key = (_mixed(_mixed(seeds) + positions))[:, None]
    bits = (token_ids * 0x9E3779B1 + (key & WORD)) & WORD
    bits = ((bits ^ (bits >> 16)) * 0x85EBCA6B + ((key >> 32) & WORD)) & WORD
    bits = ((bits ^ (bits >> 13)) * 0xC2B2AE35) & WORD
    uniform = ((bits ^ (bits >> 16)).double() + 0.5) / 2**32
    scale = temperatures.double().where(temperatures >= GREEDY, 0)[:, None]
    return (logits.double() - scale * (-torch.log1p(-uniform)).log()).argmax(dim=-1)


def _mixed(state: Tensor) -> Tensor:
    """SplitMix64's function of its state [R] int64, whose products are modulo 2^64."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64), (31, 1)):
        state = (state ^ (state >> shift & (1 << 64 - shift) - 1)) * factor
    return state


def _reads_logits_only(settings: Any) -> bool:
    """Whether the likeliest token of each row's logits is what all of a step's requests want, and no more of it."""
    processors = settings.logitsprocs.non_argmax_invariant
    asks = settings.bad_words_token_ids or settings.logprob_token_ids
    budget = settings.thinking_budget_state_holder
    return (
        settings.all_greedy
        and settings.no_penalties
        and not asks
        and settings.max_num_logprobs is settings.allowed_token_ids_mask is None
        and not (budget and budget.has_tracked_requests())
        and all(not getattr(one, IN_USE.get(type(one).__name__, ""), True) for one in processors)
    )


def _divided(noise: Noise) -> Noise:
    """Return the noise for logits that are divided by their temperatures."""
    return noise._replace(temperatures=(noise.temperatures >= GREEDY).float())


def _seed_of(request: Any) -> int:
    """Return a request's seed; all ranks draw the same one where it came without."""
    if request.sampling_params.seed is not None:
        return int(request.sampling_params.seed)
    if SEED not in vars(request):
        setattr(request, SEED, int(torch.randint(2**62, ())))
    return int(getattr(request, SEED))


@cache
def _all_ids(num: int, device: torch.device) -> Tensor:
    return torch.arange(num, device=device)


@cache
def _is_built() -> bool:
    return native_build.is_loaded(native_build.SAMPLING, "noise is computed for each token of the vocabulary")
