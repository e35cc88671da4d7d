"""What vLLM is told of how it drafts: by the plan of each step where its proposer can, a fixed number else."""

import hashlib
from pathlib import Path
from typing import Any, NamedTuple

import vllm

from models.drafting.draft_families import family_of, name_of
from models.engines.vllm import Params
from models.engines.vllm.planning import Setup, measured_for


class Speculation(NamedTuple):
    """How an engine is to draft.

    Attributes:
        target, draft: directories; None drafts nothing.
        params: how the engine runs.
        dtype: what it computes in.
        eager: whether it is compiled.
        costs: folder that keeps what steps take; None keeps it in memory.
        captures: whether hidden states are to be had of what is served.
        unplanned: why no step is planned; "" plans them where that is possible.
    """

    target: Path
    draft: Path | None
    params: Params
    dtype: str
    eager: bool
    costs: Path | None
    captures: bool = False
    unplanned: str = ""

    def arguments(self) -> tuple[dict[str, Any], Setup | None]:
        """Return vLLM's arguments, and what its scheduler plans by; none where nothing is drafted or planned.

        Raises:
            ValueError: vLLM drafts only another number of tokens with this draft.
        """
        params = self.params
        if self.draft is None or params.num_draft_tokens == 0:
            return {}, None
        own = family_of(self.draft).vllm_config(self.draft)
        if (k := own.get("num_speculative_tokens", params.num_draft_tokens)) != params.num_draft_tokens:
            raise ValueError(
                f"draft {self.draft.name} drafts {k} tokens in every step of vLLM, no other number; "
                f"got num_draft_tokens {params.num_draft_tokens}"
            )
        drafting = {
            **own,
            "num_speculative_tokens": params.num_draft_tokens,
            "draft_sample_method": params.draft_sample_method,
        }
        setup: Setup | None = None
        if not self.why_unplanned():
            most = max(params.num_draft_tokens, params.lookup.num_tokens)
            facts = measured_for(self.target, self.draft, self.dtype, self.eager, vllm.__version__, 1 + most)
            name = f"{hashlib.sha256(facts.encode()).hexdigest()[:16]}.json"
            file = None if self.costs is None else self.costs / name
            one_pass = own.get("parallel_drafting", False)
            setup = Setup(params.num_draft_tokens, params.lookup, params.lengths, file, facts, self.captures, one_pass)
            drafting["num_speculative_tokens"] = most
        # Metrics of an answer: metrics.speculative_decoding.
        return {"speculative_config": drafting, "per_request_spec_decode_metrics": "summary"}, setup

    def why_unplanned(self) -> str:
        """Return why each step drafts the same number of tokens; "" where steps are planned or nothing is drafted."""
        if self.draft is None or self.params.num_draft_tokens == 0:
            return ""
        family = family_of(self.draft)
        if getattr(family, "FIXED_K", False):
            return f"a draft of this kind ({name_of(family)}) drafts the same number of tokens in each step"
        return self.unplanned
