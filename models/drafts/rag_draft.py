"""RAPID: the target drafts after the few parts of a long prompt that its end asks for.

What a step costs grows with the prompt, as keys and values of all of it are read; after a short context the same target
is faster, and says much the same where the context has what is asked. The prompt's first part and its end, which is
taken for the question, are always kept; between them, the parts that BM25 scores highest in their order, as far as they
have anything to do with the question. They are chosen once, when the prompt has been read; the answer is read behind
them as it comes. A prompt that is no longer than the context is not drafted for: the target would only do its work
twice.

The paper finds parts by an embedding model and five more by BM25, sets them in a prompt of their own, and drafts with
other and larger models too. Here is BM25 alone, over the engine's tokens, and the parts follow each other as they are.
The paper's own rule, which lets the draft's knowledge in, is `models.verify.knowledge_transfer`. What is drafted hangs
on where the prompt ended, which the rows of training and scoring don't tell.
"""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from models.core.drafting.proposal import Proposal
from models.core.drafting.reading import Reader
from models.core.drafting.self_draft import SelfFormat, TargetRunner
from models.core.drafting.weightless import Weightless
from models.core.layers.decoder import Begun, Cache, Decoder
from models.drafts import Draw, GoOn, KeepRows, Rows, Unrolled
from models.params import BaseParams

PAPER = "arXiv:2502.20330"
ARCHITECTURES = ("RagDraft",)
SERVED = False
SATURATION, BY_LENGTH = 1.2, 0.75  # BM25's k₁ and b


class Params(BaseParams):
    """What the draft reads of a prompt, in tokens."""

    name: Literal["rag_draft"] = "rag_draft"
    context: int = Field(1024, ge=1, description="the most of it.")
    part: int = Field(64, ge=1, description="how long the parts are that are chosen or left out.")
    question: int = Field(128, ge=1, description="how much of the prompt's end is looked for, and always read.")

    @model_validator(mode="after")
    def _sizes_fit(self) -> Self:
        if self.context < self.question + 2 * self.part:
            raise ValueError(
                f"wanted a context of the question and two parts, {self.question + 2 * self.part}; got {self.context}"
            )
        return self


class RagDraft(TargetRunner, Weightless):
    params: Params
    replayable = False
    expands = True

    def unroll(self, rows: Rows, num_steps: int, keep: KeepRows | None = None) -> list[Unrolled]:
        """Raise a ValueError."""
        raise ValueError(
            "RagDraft chooses what it reads when a prompt ends, and rows don't say where, so it can't be scored on "
            "answers that are there already; measure it in the reference engine"
        )

    def drafter(self, max_len: int) -> "_Drafter":
        return _Drafter(self, max_len)

    def choose(self, prompt: list[int]) -> list[int]:
        """Return what is read of a prompt that is longer than the context, at most as many tokens as that holds."""
        size, tail = self.params.part, self.params.question
        question, rest = prompt[-tail:], prompt[:-tail]
        parts = [rest[start : start + size] for start in range(0, len(rest), size)]
        scores = score(parts, question)
        # The last part may be short; of equal ones the later is nearer to what is asked.
        ranked = sorted(range(1, len(parts)), key=lambda part: (-scores[part], -part))
        room = (self.params.context - tail) // size - 1
        chosen = sorted(part for part in ranked[:room] if scores[part] > 0)
        return [token for part in (0, *chosen) for token in parts[part]] + question


class _Drafter(Reader):
    """See `drafting.reading.Reader` and `drafting.drafters.SelfDrafter`; the cache is its own, the weights the
    engine's."""

    draft: RagDraft

    def __init__(self, draft: RagDraft, max_len: int) -> None:
        super().__init__(draft, max_len)
        self._target: Decoder | None = None
        self._fits = False  # the prompt into the context

    def share(self, target: Decoder, cache: Cache) -> None:
        self._target = target

    def begun(self) -> Begun | None:
        """See `models.core.drafting.drafters.SelfDrafter`; nothing has, as all is read after another text."""
        return None

    def decoder(self) -> Decoder:
        self._target = self._target or self.draft.decoder()
        return self._target

    def extend(self, token_ids: Tensor, hidden: Tensor) -> None:
        """See the base; the first call brings the prompt and one token of the answer."""
        if self.known:
            super().extend(token_ids, hidden)
            return
        *prompt, first = token_ids.tolist()
        self._fits = len(prompt) <= self.draft.params.context
        if not self._fits:
            chosen = self.draft.choose(prompt)
            self.max_len -= len(prompt) - len(chosen)
            prompt = chosen
        self.known = [*prompt, first]

    def expand(self, token_ids: Sequence[int], parents: Sequence[int], nodes: Sequence[int]) -> Tensor:
        """See the base; nothing can be drafted where the prompt fits into the context."""
        if self._fits:
            decoder = self.decoder()
            return torch.full((len(nodes), decoder.vocab_size), float("-inf"), device=decoder.device)
        return super().expand(token_ids, parents, nodes)

    def propose(self, num_tokens: int, draw: Draw, go_on: GoOn | None = None) -> Proposal:
        """See the base; nothing is drafted where the prompt fits into the context."""
        if self._fits:
            return Proposal.chain([], device=self.decoder().device)
        return super().propose(num_tokens, draw, go_on)


def score(parts: Sequence[Sequence[int]], question: Sequence[int]) -> list[float]:
    """Score parts of a text by a question, token ids; 0 for a part that has no token of it.

    Σ over the question's different tokens t:  idf(t) · f (k₁ + 1) / (f + k₁ (1 − b + b · length / mean))

    f is how often t stands in the part, idf(t) = log(1 + (N − n + ½) / (n + ½)) with n of the N parts holding t, which
    is never below 0: a token that every part holds says next to nothing (Robertson and Zaragoza, The Probabilistic
    Relevance Framework: BM25 and Beyond, 2009).
    """
    counts = [Counter(part) for part in parts]
    mean = sum(map(len, parts)) / max(len(parts), 1)
    scores = [0.0] * len(parts)
    for token in sorted(set(question)):
        holding = sum(token in count for count in counts)
        weight = math.log(1 + (len(parts) - holding + 0.5) / (holding + 0.5))
        for number, count in enumerate(counts):
            if often := count[token]:
                length = 1 - BY_LENGTH + BY_LENGTH * len(parts[number]) / mean
                scores[number] += weight * often * (SATURATION + 1) / (often + SATURATION * length)
    return scores


_format = SelfFormat("rag_draft", ARCHITECTURES, Params, RagDraft)
create, renew, save, load, check = _format.create, _format.renew, _format.save, _format.load, _format.check
vllm_config, vllm_weights = _format.vllm_config, _format.vllm_weights
