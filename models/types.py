"""Values that several rooms pass around, each defined once: no I/O, and nothing but pydantic is imported.

What is gated, estimated or measured in `models` is kept, sent and shown by `infra` as it is.
"""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

# Lists a directory's files with their sha256 and sizes (`infra.artifacts`).
MANIFEST_NAME = "manifest.json"
ALL = ""  # the finding on all domains together
# Tokens of an answer: one that the prompt gives, one that is drafted and one after it. A shorter one teaches nothing.
MIN_COMPLETION = 3
# Steps of a domain before its speed is told.
MIN_STEPS = 192
# Share of a domain's steps: where fewer are drafted, it is only tried now and then whether drafts pay.
RARELY = 0.02

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
GateVerdict = Literal["passed", "undecided", "refused"]
Kind = Literal["target", "draft"]  # of what is registered and served


class Frozen(BaseModel):
    """A value: can't be changed, takes no unknown key."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Estimate(Frozen):
    """A figure and the ends of its interval."""

    value: float
    low: float
    high: float

    def times(self, factor: float) -> "Estimate":
        """Return it in another unit, such as per cent; the factor is positive."""
        return Estimate(value=factor * self.value, low=factor * self.low, high=factor * self.high)

    def text(self, form: str) -> str:
        """Return it in words, each number by a format such as ".2f"."""
        return f"{self.value:{form}} ({self.low:{form}} to {self.high:{form}})"


class GateParams(Frozen):
    """What a challenger is held to."""

    name: Literal["gate"] = Field("gate", description="the one test that there is")
    floor: float = Field(0.05, ge=0, lt=1, description="share of τ that a domain may lose")
    confidence: float = Field(0.95, gt=0.5, lt=1, description="of each domain's one-sided bound")
    num_resamples: int = Field(2000, ge=100, description="bootstrap resamples for each domain's bound")
    floor_conversations: int = Field(
        100, ge=2, description="of a domain, from which on its floor may hold; below, it is reported only"
    )
    alpha_total: float = Field(
        0.05, gt=0, lt=0.5, description="chance that a champion is ever replaced by a draft without gain"
    )


class RolloutParams(Frozen):
    """How a new champion gets to many replicas: one canary first, then waves.

    Attributes:
        waves: share of the replicas that have it after each wave behind the canary's; the last is 1.
        pause_s: seconds between the end of a wave and the next; each replica that swaps forgets its cached prefixes.
        test_s: seconds that the canary serves it without a verdict of the post-promotion test; then waves go on
            without one.
    """

    waves: tuple[float, ...] = (0.25, 0.5, 1.0)
    pause_s: float = Field(default=60.0, ge=0, allow_inf_nan=False)
    test_s: float = Field(default=3600.0, ge=0, allow_inf_nan=False)

    @field_validator("waves")
    @classmethod
    def _reach_all(cls, waves: tuple[float, ...]) -> tuple[float, ...]:
        if not waves or waves[-1] != 1 or any(low >= high for low, high in zip((0.0, *waves), waves, strict=False)):
            raise ValueError(f"waves are {list(waves)}, wanted shares that grow from above 0 to 1")
        return waves


class DomainEvidence(Frozen):
    """What was found in one domain.

    Attributes:
        num_conversations: that the draft and the domain's best past one were scored on.
        tau_before: the champion's τ; None without a champion or a conversation.
        tau_after: the draft's own τ; None without a conversation.
        reference: τ of the domain's best past draft; None where the domain has no floor.
        change: (τ after − reference) / reference on the same conversations; its `low` is held against −floor.
        refusals: why the domain stands against promotion; empty if it does not.
        binding: whether a loss blocks: there are enough conversations, and they say as much as the floor asks.
        coverage: share of the answers' tokens that the draft's vocabulary has; one that it lacks is always rejected.
    """

    num_conversations: int
    tau_before: float | None = None
    tau_after: float | None
    reference: float | None = None
    change: Estimate | None = None
    refusals: tuple[str, ...] = ()
    binding: bool = False
    coverage: float | None = None


class GateTest(Frozen):
    """The test over all conversations, and what it was held to.

    Attributes:
        parent: the champion that the challenger was compared with; also the one that it was trained from, if it was
            trained here.
        continues: the checkpoint that it resumed; None if from the champion, or if it was trained elsewhere.
        returns: the past draft that it is; None if it is not one.
        rows: first and last of the query log that it was trained on last; None for a draft from elsewhere, and for one
            that returns.
        gain: difference in accepted tokens a step over all its windows, where what is alike counts once; each end is
            wrong with chance `alpha`, however often it is looked at.
        last: that of the last window's traffic, where each counts as often as it is asked, with a 95% interval for this
            one look; None where nothing was held out.
        num_windows, num_conversations, num_clusters: that the gain is from.
        test_index: which challenger of its champion this was, from 1.
        params: what it was held to.
        left_out: domains without a conversation to score.
    """

    parent: int | None = None
    continues: int | None = None
    returns: int | None = None
    rows: tuple[int, int] | None = None
    gain: Estimate
    alpha: float
    test_index: int
    params: GateParams
    left_out: tuple[str, ...] = ()
    last: Estimate | None = None
    num_windows: int = 0
    num_conversations: int = 0
    num_clusters: int = 0


class GateReport(Frozen):
    """What became of a draft at its gate, and all that it rests on.

    Attributes:
        verdict, test: None for a draft that started a line, which no gate tested.
        reasons: why it did not pass, or how far it has come.
        num_draft_tokens: K.
        domains: what was found in each.
    """

    verdict: GateVerdict | None
    reasons: tuple[str, ...]
    num_draft_tokens: int
    domains: dict[str, DomainEvidence]
    test: GateTest | None


class Finding(Frozen):
    """What the requests of a domain, or all of them, say of a promoted draft and the one before it.

    Attributes:
        num_requests: how many.
        tau, previous_tau: of the promoted draft and of the one before it, each request counting the same.
        allowed: share of τ that may be lost.
        excess: mean of steps per token above what is allowed, negative where there is room.
        excess_low: what the excess is at least, with confidence 1 − alpha at all looks together.
        alpha: the error that this finding has.
        lost: whether more than what is allowed was lost.
    """

    num_requests: int
    tau: float
    previous_tau: float
    allowed: float
    excess: float
    excess_low: float
    alpha: float
    lost: bool


class ThroughputEstimate(Frozen):
    """How steps are drafted at the present load, and what that is expected to give."""

    num_draft_tokens: int = Field(description="tokens that the draft model drafts in a step, 0 where none pays")
    why: str = Field(description="why: `pays`, `loses`, `explores`, `unmeasured` or `fixed`")
    tokens_per_s: float = Field(description="expected of all running requests together; 0 as long as nothing tells")
    plain_tokens_per_s: float = Field(description="the same without any draft")
    measurement_overhead: float = Field(
        0.0, description="share of them that is lost while a request is drafted head-only, to measure acceptance"
    )


class Speed(Frozen):
    """How fast one request of a domain is answered, by the times of steps; told from MIN_STEPS of them on."""

    tokens_per_s: float = Field(description="tokens a second of one request, as it is drafted")
    plain_tokens_per_s: float = Field(description="the same without any draft, by what plain steps take")
    low: float = Field(description="lower end of a 95% interval of their quotient")
    high: float = Field(description="its upper end")
    drafted: float = Field(description="share of steps that verified drafted tokens; next to none where none pay")

    @property
    def gain(self) -> str:
        """Return the quotient in words."""
        return f"{self.tokens_per_s / self.plain_tokens_per_s:.2f}× ({self.low:.2f} to {self.high:.2f})"

    def verdict(self, domain: str) -> str:
        """Return in words what speculation gives a domain."""
        if self.low > 1:
            does = f"speeds {domain} up {self.gain}"
        elif self.high < 1:
            lost = 1 - self.tokens_per_s / self.plain_tokens_per_s
            does = f"costs {domain} {lost:.0%} ({1 - self.high:.0%} to {1 - self.low:.0%})"
        else:
            does = f"has shown neither gain nor loss on {domain}, {self.gain}"
        off = ": off there" if self.drafted < RARELY else ""
        return f"{does}{off}; {self.tokens_per_s:.1f} tokens/s of one request, {self.plain_tokens_per_s:.1f} without"
