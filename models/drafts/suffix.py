"""Suffix decoding: draft what followed the longest ending that stood in the request's own text or in recent answers.

A match of p tokens is worth drafting about α·p tokens after it: the longer it is, the longer it tends to go on. The
paper keeps suffix trees of unbounded texts; here the places of each n-gram are kept (`models.core.drafting.lookup`),
which finds the same longest match among the latest places, and the draft is the chain that followed it. Answers of
earlier requests are remembered up to a number of tokens.

Scored on logged answers, a draft knows the request's own text alone, so it accepts at least as much when it serves.
"""

from typing import Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from models.core.drafting.lookup import Answers, Sequence
from models.core.drafting.proposal import Proposal
from models.core.drafting.weightless import Format, TextDraft
from models.drafts import Draw, GoOn
from models.params import BaseParams

PAPER = "arXiv:2411.04975"
ARCHITECTURES = ("SuffixDraft",)
SERVED = False
# Read in vLLM 0.32: config/speculative.py, _validate_suffix_decoding; `redraft doctor` shows it.
UNSERVED = "vLLM's suffix trees are a package's, arctic-inference, and have none of these settings"


class Params(BaseParams):
    """What is looked up."""

    name: Literal["suffix"] = "suffix"
    shortest: int = Field(2, ge=1, description="the fewest last tokens that are looked up.")
    longest: int = Field(24, ge=1, description="the most.")
    factor: float = Field(1.0, gt=0, description="α, tokens drafted for each token of a match.")
    remembered: int = Field(8192, ge=0, description="tokens of recent answers that are looked up too, 0 for none.")

    @model_validator(mode="after")
    def _sizes_fit(self) -> Self:
        if self.shortest > self.longest:
            raise ValueError(f"wanted shortest ≤ longest; got {self.shortest} and {self.longest}")
        return self


class Suffix(TextDraft):
    params: Params

    def __init__(self, params: Params, config: dict[str, object]) -> None:
        super().__init__(params, config)
        self.answers = Answers(params.shortest, params.remembered)

    def follow(self, token_ids: list[int], num_tokens: int) -> list[int]:
        sequence = Sequence(self.params.shortest, self.params.longest)
        sequence.extend(token_ids)
        return look_up(sequence, num_tokens, self.params)

    def drafter(self, max_len: int) -> "_Drafter":
        return _Drafter(self)


class _Drafter:
    def __init__(self, draft: Suffix) -> None:
        self.draft = draft
        self._sequence = Sequence(draft.params.shortest, draft.params.longest)
        self._num_prompt_tokens = 0
        self._device = torch.device("cpu")

    def extend(self, token_ids: Tensor, hidden: Tensor) -> None:
        if not len(self._sequence):
            self._num_prompt_tokens = len(token_ids) - 1
        self._sequence.extend(token_ids.tolist()[1 if len(self._sequence) else 0 :])
        self._device = token_ids.device

    def propose(self, num_tokens: int, draw: Draw, go_on: GoOn | None = None) -> Proposal:
        self._sequence.answers = self.draft.answers
        return Proposal.chain(look_up(self._sequence, num_tokens, self.draft.params), device=self._device)

    def end(self) -> None:
        """See `models.core.drafting.drafters.Remembering`; the answer comes with the prompt's end, which finds it."""
        start = max(0, self._num_prompt_tokens - self.draft.params.shortest)
        self.draft.answers.add(self._sequence.token_ids[start:])


def look_up(sequence: Sequence, num_tokens: int, params: Params) -> list[int]:
    """Return at most `num_tokens` tokens that followed the longest match of a sequence's end, α of them a token."""
    match = sequence.look_up(num_tokens)
    return match.token_ids[: max(1, int(params.factor * match.length))]


_format = Format("suffix", ARCHITECTURES, Params, Suffix)
create, renew, save, load, check = _format.create, _format.renew, _format.save, _format.load, _format.check
vllm_config, vllm_weights = _format.vllm_config, _format.vllm_weights
