"""Engines: a running target and draft. Each generates, swaps its draft, proves what is loaded, can stop speculating.

`vllm` is the production engine; `torch` is the reference, for one stream, without processes of its own. Each module has
`Params`, `start(target, draft, params, served_name, draft_version)`, which returns an `Engine`,
`child_environment(params)`, the variables that its process must have, `require_draft(draft, params)`, a ValueError if
it can't draft so with drafts of those Params or would not read some of its own, `require_target(architecture, config,
draft, params)`, one if it can't run such a target with them, and `require_serving(serve, draft)`, one if it can't serve
so.
"""

from abc import abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Literal, NamedTuple, Protocol, Self

from pydantic import Field, model_validator

from models.core.evaluation.acceptance import Trace, counted
from models.params import BaseParams
from models.types import Frozen

# How a request is drafted: as the engine finds it fastest, by the draft alone and up to K, or not at all.
Way = Literal["auto", "head", "off"]
OnFirstToken = Callable[[], None]


class Rules(NamedTuple):
    """The rules that an engine verifies by, and how it drafts for them."""

    greedy: BaseParams  # at temperature 0
    sampling: BaseParams  # above
    draws: bool = True  # at temperatures above 0 drafted tokens are drawn from q; else they are its likeliest

    def at(self, temperature: float) -> BaseParams:
        """Return the rule of requests of a temperature."""
        return self.sampling if temperature > 0 else self.greedy


class EngineParams(BaseParams):
    """What every engine's `Params` say.

    Attributes:
        num_draft_tokens: K, the most tokens drafted in a step, branches included; 0 starts an engine that can't
            speculate.
        max_model_len: longest sequence, prompt included.
    """

    num_draft_tokens: int = Field(3, ge=0)
    max_model_len: int = Field(1024, ge=2)

    @property
    @abstractmethod
    def rules(self) -> Rules:
        """What drafted tokens are verified by."""


class LookUp(Frozen):
    """What is looked up beside the draft, see `models.core.drafting.lookup`.

    Attributes:
        num_tokens: the most tokens that are drafted so; 0 looks nothing up.
        shortest, longest: tokens at the end of a sequence that must stand elsewhere too.
        remembered: tokens of recent answers that are kept in memory for each API key and looked up by its other
            requests; 0 looks up a request's own text alone.
    """

    num_tokens: int = Field(8, ge=0, le=64)
    shortest: int = Field(3, ge=1)
    longest: int = Field(16, ge=1)
    remembered: int = Field(8192, ge=0)

    @model_validator(mode="after")
    def _a_match_has_a_length(self) -> Self:
        if self.shortest > self.longest:
            raise ValueError(f"wanted shortest ≤ longest; got {self.shortest} and {self.longest}")
        return self


class Sampling(Frozen):
    """How one request is decoded, and when."""

    max_tokens: int = 128
    temperature: float = 0.0  # 0 is greedy
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    num_logprobs: int | None = None  # from 2 on, the gaps of the two best tokens are recorded
    ignore_eos: bool = False
    stop_ids: tuple[int, ...] = ()  # tokens that end an answer beside the model's own, and stand at its end
    priority: int = 0  # whose turn is first where an engine is full; the lower comes first
    piece: int = 0  # tokens of the prompt read in one step beside other requests, which wait less; 0: the engine's own
    drafting: Way = "head"  # by which acceptance is measured; served is "auto", the same in engines without plans


class Completion(Frozen):
    """One finished answer and how it was drafted.

    What is told by step is told of verification steps: the prefill is none. Matches are the tokens that a step's draft
    was looked up by; 0 where the draft model drafted, `acceptance.UNDRAFTED` where neither was run.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    drafted: tuple[int, ...]  # tokens by step, 0 in one without a draft
    accepted: tuple[int, ...]  # by step
    drafted_ids: tuple[tuple[int, ...], ...]  # by step; of a tree all of them, parents before children
    finish_reason: str | None  # None when the client went away
    first_token_ms: float
    per_token_ms: float
    draft_version: str
    speculating: bool
    server: str = ""  # which of several servers answered, if it said
    gaps: tuple[float, ...] = ()  # log-probability of the best token minus that of the second, by token, if asked for
    matches: tuple[int, ...] = ()  # by step
    drafting: Way = "head"
    structured: bool = False  # a grammar constrained it, so that what was accepted says little of the draft

    def trace(self, domain: str) -> Trace:
        """What acceptance is computed from."""
        drafted, accepted = counted(self.drafted, self.accepted, self.matches)
        return Trace(
            request_id=self.request_id, token_ids=self.token_ids, drafted=drafted, accepted=accepted, domain=domain
        )


class NotSwitchable(ValueError):
    """This engine's speculation can't be switched off."""


class Engine(Protocol):
    """What the gate, the reconciler and the benchmarks ask of a running engine."""

    @property
    def draft_version(self) -> str:
        """What the loaded draft is called."""

    @property
    def speculating(self) -> bool:
        """Whether steps are drafted."""

    async def generate(
        self, prompt_ids: list[int], sampling: Sampling, request_id: str, on_first_token: OnFirstToken | None = None
    ) -> Completion:
        """Answer one prompt; ValueError if it is empty or does not fit the context, or a setting is out of range.

        `request_id` is that of no other request on its way; `on_first_token` is called when the prompt has been read.
        """

    async def swap_draft(self, directory: Path, version: str) -> float:
        """Replace the draft between two steps and return the milliseconds; ValueError changes nothing."""

    async def check_draft(self, directory: Path) -> float:
        """Return the loaded draft's largest relative error from the weights in `directory`; ValueError if another."""

    async def set_speculation(self, on: bool) -> None:
        """Switch drafting; ValueError if there is no draft to switch on, NotSwitchable if it can't be off."""

    async def health(self) -> None:
        """Raise RuntimeError when the target can't serve."""

    async def close(self) -> None:
        """End it."""
