"""What drafts inside of vLLM: its own proposer, with as many passes as a step is worth, and look-up joined to it.

Each step has a plan in place of a fixed K, and rows are looked up (models/core/drafting/lookup.py) where that is
expected to be accepted more. The draft draws by the noise that the target will draw the same position by
(`sampling`), so that nothing is told of q, and a looked-up token is verified as any. The plan comes with the step from
the scheduler, so every rank of a tensor-parallel engine makes the same passes.

`disable_padded_drafter_batch` is set for good: the proposer then runs after the accepted tokens are known, and gets
only those. vLLM's small LMs, P-EAGLE and DFlash refuse to be made so, but draft the first tokens after a prompt without
padding, and after any other step as well. Medusa's heads and n-grams are proposers of other kinds: their K is fixed.

Replaces: `vllm.v1.spec_decode.llm_base_proposer.SpecDecodeBaseProposer.propose`,
    `vllm.v1.spec_decode.llm_base_proposer.SpecDecodeBaseProposer._sample_draft_tokens`,
    `vllm.v1.worker.gpu_model_runner.GPUModelRunner.propose_draft_token_ids`, in one runner and its proposer.
Tried with: vLLM 0.32.
No hook: K of a step is one, and is used; a proposer of one's own ("custom_class") gets neither the target's states
    nor a draft that vLLM loads, and hands on no q.
Without it: each step drafts the same number of tokens, nothing is looked up, and nothing is captured.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

from models.core.drafting.lookup import NgramIndex
from models.engines.vllm.capture import Ring
from models.engines.vllm.fields import MEASURE, NOTHING, NUM_READ, UNTOLD, DraftOptions, Row, StepPlan
from models.engines.vllm.patches import require
from models.engines.vllm.patches.fused_eagle3 import FusedDraft
from models.engines.vllm.patches.sampling import Noise

# What the proposer reads of vLLM's runner and proposer.
READS = (
    *("input_batch", "requests", "max_model_len", "speculative_config", "propose_draft_token_ids"),
    *("num_spec_tokens", "_draft_token_ids", "_draft_token_req_ids"),
)
DRAFTER_READS = (
    *("propose", "_sample_draft_tokens", "_greedy_sample", "_enable_probabilistic_draft_probs", "draft_model_config"),
    *("max_model_len", "parallel_drafting", "use_local_argmax_reduction", "use_heterogeneous_vocab"),
)


class Planned:
    """Stands before a runner's proposer, which is of the one base class of most of vLLM's."""

    def __init__(self, runner: Any, library: NgramIndex) -> None:
        """Put this in place; ValueError if vLLM's proposer has another layout than the one this was written for."""
        drafter: Any = runner.drafter
        if not isinstance(runner.drafter, SpecDecodeBaseProposer):
            raise ValueError(f"vLLM drafts by {type(drafter).__name__}; another release is installed than wanted")
        require(runner, *READS)
        require(drafter, *DRAFTER_READS)
        self.ring: Ring | None = None  # holds states of requests that want it
        self.library, self._runner, self._drafter = library, runner, drafter
        # Residual streams that the draft reads, where the target hands out its last one too.
        self._num_read: int | None = getattr(runner, NUM_READ, None)
        self._of_runner, self._propose = runner.propose_draft_token_ids, drafter.propose
        self._noise: Noise | None = None  # of the next token that the draft draws; None where it takes the likeliest
        self._fused = FusedDraft.of(drafter)
        runner.speculative_config.disable_padded_drafter_batch = True
        runner.propose_draft_token_ids = self.propose_unless_it_rests
        drafter.propose, drafter._sample_draft_tokens = self.propose, self.sample_draft_tokens

    def look_up_alone(self, step: StepPlan) -> None:
        """Look up what follows a plain step, after which vLLM proposes nothing."""
        if step.num_looked_up and self._runner.num_spec_tokens:
            self._runner._draft_token_ids = [row.packed() for row in self._look_up(step)]
            self._runner._draft_token_req_ids = self._runner.input_batch.req_ids.copy()

    def propose_unless_it_rests(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        """Return packed rows; none where nothing is drafted: what vLLM prepares for a draft takes 2% of a step."""
        step = scheduler_output.num_spec_tokens_to_schedule
        if not isinstance(step, StepPlan) or not step.is_plain:
            return self._of_runner(scheduler_output, *args, **kwargs)
        return [row.packed() for row in self._look_up(step)] if step.num_looked_up else []

    def propose(self, num_speculative_tokens: Any, *args: Any, **kwargs: Any) -> Any:
        """Return a packed `Row` for each sequence, by the step's `StepPlan`; what vLLM's returns for a number.

        A number is what vLLM's own warm-up says. `next_token_ids` are the tokens after the accepted ones.
        """
        step = num_speculative_tokens if isinstance(num_speculative_tokens, StepPlan) else None
        if self.ring is not None and step is not None:
            self._capture(self.ring, kwargs)
        if self._num_read is not None:  # the last one is there to be captured
            states = kwargs["target_hidden_states"].unflatten(-1, (self._num_read + 1, -1))
            kwargs["target_hidden_states"] = states[:, :-1].flatten(1)
        if step is None:
            return self._propose(num_speculative_tokens, *args, **kwargs)
        requests, names, rows = self._runner.requests, self._runner.input_batch.req_ids, self._look_up(step)
        wanted = [
            0 if row.looked_up else self._wanted(requests[name], step) for name, row in zip(names, rows, strict=True)
        ]
        noise = Noise.of(self._runner) if self._drafter._enable_probabilistic_draft_probs else None
        for passes in step.passes:
            places = [place for place, name in enumerate(names) if passes.over(name)]
            num_tokens = min(passes.num, max((wanted[place] for place in places), default=0))
            self._noise = noise and noise.of_rows(places)
            if not places:
                continue
            least = [self._least(requests[names[place]], step) for place in places]
            drafted = self._by_head(num_tokens, torch.tensor(least), *args, **_of_rows(kwargs, places))
            for place, limit, tokens, chances in zip(places, least, *(one.tolist() for one in drafted), strict=True):
                if not rows[place].looked_up:
                    rows[place] = rows[place].of_head(tokens, wanted[place], chances if limit >= 0 else ())
        return [row.packed() for row in rows]

    def _by_head(self, num_tokens: int, least: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Return [B, num_tokens] of the draft; for 0 it makes the pass that keeps its keys whole, and no more.

        The chances beside them, and what `least` does, are said at `FusedDraft.propose`; drafts of other kinds have no
        chances [B, 0] and all of their tokens.

        Masked places of P-EAGLE see those before them alone, so there are as many as are wanted. Those of DFlash all
        see each other: a block is whole, as in training, and its first tokens are taken.
        """
        asked, drafter = num_tokens, self._drafter
        block = getattr(drafter.draft_model_config.hf_config, "block_size", 0)
        if self._fused is not None:
            fused = self._fused.propose(num_tokens, kwargs, self._noise, least if (least >= 0).any() else None)
            if fused is not None:
                return fused
        if not drafter.parallel_drafting:
            metadata = kwargs["common_attn_metadata"]  # of a CPU both its lengths are one tensor, counted up twice
            kwargs["common_attn_metadata"] = metadata.replace(seq_lens=metadata.seq_lens.clone())
        elif block:
            asked = block - 1 if num_tokens else 0
        else:
            drafter.extra_slots_per_request = max(num_tokens, 1)
            drafter.net_num_new_slots_per_request = drafter.extra_slots_per_request - 1
        tokens: Tensor = self._propose(asked, *args, **kwargs)
        return tokens[:, :num_tokens], tokens.new_empty(len(tokens), 0)

    def _look_up(self, step: StepPlan) -> list[Row]:
        """Follow the sequences of a step and look them up; a row each, an empty one where that is not to be used."""
        rows = [self._looked_up(place, step) for place in range(len(self._runner.input_batch.req_ids))]
        self.library.close_all_but(self._runner.requests)
        return rows

    def _captured(self) -> list[str]:
        requests = self._runner.requests
        return [DraftOptions.of(requests[name].sampling_params).capture for name in self._runner.input_batch.req_ids]

    def _capture(self, ring: Ring, step: Mapping[str, Any]) -> None:
        names = self._captured()
        if any(names):
            borders = step["common_attn_metadata"].query_start_loc_cpu[: len(names) + 1].tolist()
            ring.note(names, borders, *(step[f"target_{name}"] for name in ("positions", "token_ids", "hidden_states")))

    def sample_draft_tokens(self, hidden_states: Tensor, settings: Any) -> tuple[Tensor, None]:
        """Return each row's token, and nothing of q; see vLLM's proposer.

        Of a draft with a vocabulary of its own the token is found there and then mapped. vLLM first spreads the
        logits over the target's vocabulary. For 16 rows, 4,096 tokens of a draft and 49,152 of its target, that took
        9 ms instead of 1 or 2 by itself, product included (two cores of an AMD EPYC).
        """
        drafter, model, noise = self._drafter, self._drafter.model, self._noise
        offsets = getattr(model, "draft_id_to_target_id", None)
        if drafter.use_heterogeneous_vocab or (
            noise is None and (offsets is None or drafter.use_local_argmax_reduction)
        ):
            return drafter._greedy_sample(hidden_states), None
        if offsets is None:
            logits, token_ids = model.compute_logits(hidden_states), None
        else:
            logits = model.logits_processor(model.lm_head, hidden_states)
            token_ids = torch.arange(len(offsets), device=offsets.device) + offsets
        if noise is None:
            drawn = logits.argmax(dim=-1)
        else:
            num = len(logits) // len(noise.seeds)  # of a sequence: all, where one pass says them
            drawn, self._noise = noise.over([num] * len(noise.seeds)).draw(logits, token_ids), noise.after([num])
        return (drawn if token_ids is None else token_ids[drawn]), None

    def _wanted(self, request: Any, step: StepPlan) -> int:
        """Return how many tokens the head drafts for a request; the scheduler knows whether all are verified."""
        draft_options = DraftOptions.of(request.sampling_params)
        if draft_options.drafting == "auto":
            return max(step.plan.num_kept(draft_options.domain, "head", whole=whole) for whole in (True, False))
        return step.num_passes if draft_options.drafting in ("head", MEASURE) else 0

    def _least(self, request: Any, step: StepPlan) -> float:
        """Return the chance below which a request's chain ends; below 0 where its chances tell nothing."""
        draft_options = DraftOptions.of(request.sampling_params)
        return step.plan.stops.get(draft_options.domain, 0.0) if draft_options.drafting == "auto" else UNTOLD

    def _looked_up(self, place: int, step: StepPlan) -> Row:
        """Follow a row's sequence and, if it is drafted as is fastest, look it up."""
        if step.num_looked_up == 0:
            return NOTHING
        batch = self._runner.input_batch
        name = batch.req_ids[place]
        request = self._runner.requests[name]
        draft_options = DraftOptions.of(request.sampling_params)
        num_tokens = int(batch.num_tokens_no_spec[place])
        most = min(step.num_looked_up, self._drafter.max_model_len - num_tokens - 1)
        if draft_options.drafting == MEASURE:  # no key's, so nothing of it is remembered
            filled = [int(batch.token_ids_cpu[place, num_tokens - 1]) ^ 1] * most
            return Row(0, 0, True, filled) if place < step.num_filled else NOTHING
        sequence = self.library.sequence(name, draft_options.key, request.num_prompt_tokens)
        sequence.extend(batch.token_ids_cpu[place, len(sequence) : num_tokens].tolist())
        if draft_options.drafting != "auto" or most < 1:
            return NOTHING
        match = sequence.look_up(most)
        kept = step.plan.num_kept(draft_options.domain, "lookup", match.length) if match.length else 0
        return Row(match.length, len(match.token_ids), kept > 0, match.token_ids[:kept])


def _of_rows(step: Mapping[str, Any], places: Sequence[int]) -> dict[str, Any]:
    """Return what vLLM's `propose` gets for some sequences of a step, whose places ascend; all if they are all."""
    metadata = step["common_attn_metadata"]
    if len(places) == metadata.num_reqs:
        return dict(step)
    at, borders = torch.tensor(places), metadata.query_start_loc_cpu
    lengths = borders.diff()[at]
    tokens = torch.cat([torch.arange(borders[place], borders[place + 1]) for place in places])
    borders = torch.cat([lengths.new_zeros(1), lengths.cumsum(0, dtype=lengths.dtype)])
    device = metadata.query_start_loc.device
    by_row, by_token = at.to(device), tokens.to(device)
    return {
        **step,
        "target_token_ids": step["target_token_ids"][by_token],
        "target_positions": step["target_positions"][..., by_token],
        "target_hidden_states": step["target_hidden_states"][by_token],
        "next_token_ids": step["next_token_ids"][by_row],
        "common_attn_metadata": metadata.replace(
            query_start_loc=borders.to(device),
            query_start_loc_cpu=borders,
            seq_lens=metadata.seq_lens[by_row],
            seq_lens_cpu_upper_bound=bound if (bound := metadata.seq_lens_cpu_upper_bound) is None else bound[at],
            is_prefilling=reads if (reads := metadata.is_prefilling) is None else reads[by_row],
            num_reqs=len(places),
            num_actual_tokens=len(tokens),
            max_query_len=int(lengths.max()),
            block_table_tensor=metadata.block_table_tensor[by_row],
            slot_mapping=metadata.slot_mapping[by_token],
            _num_computed_tokens_cache=None,
            _token_to_req_indices_cache=None,
        ),
    }
