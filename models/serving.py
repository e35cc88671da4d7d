"""How a service serves: table [serve] of a recipe."""

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from models import catalog
from models.core.evaluation.drift_detector import Params as DriftDetector
from models.core.evaluation.golden import CanaryParams
from models.params import BaseParams, require_unsaid
from models.types import Frozen, Positive, RolloutParams


class Limits(Frozen):
    """What clients can take of a service.

    Attributes:
        max_share_per_key: share of the engine's sequences that one key's requests take at once, however few others ask;
            without keys all of it is free.
        max_queued_requests: requests that wait; above it the answer is 503. Of one key half as many; above it 429.
        max_queued_tokens_per_key: tokens that the waiting requests of one key may take, prompts and answers; 429.
        max_body_bytes: largest request body.
        max_held_bytes: of the bodies of all requests that are being answered; above it the answer is 503. Of one key
            half as many; above it 429.
        body_timeout_s: seconds that a body may take to arrive.
    """

    max_share_per_key: float = Field(default=0.75, gt=0, le=1)
    max_queued_requests: int = Field(default=256, ge=0)
    max_queued_tokens_per_key: int = Field(default=1 << 20, ge=0)
    max_body_bytes: int = Field(default=1 << 20, ge=1)
    max_held_bytes: int = Field(default=64 << 20, ge=1)
    body_timeout_s: Positive = 30.0


class Structured(Frozen):
    """Answers of a form that the client names: a JSON schema, a regex, a grammar, a forced tool call.

    Attributes:
        enabled: whether they are given; each is compiled, first in a process of its own.
        max_bytes: largest schema, grammar or list of choices.
        max_depth: how deep a schema may be nested.
        max_regex: longest pattern, in characters.
        timeout_s: seconds that compiling may take.
        max_memory_mib: memory that compiling may take.
    """

    enabled: bool = True
    max_bytes: int = Field(default=16384, ge=1)
    max_depth: int = Field(default=16, ge=1, le=64)
    max_regex: int = Field(default=512, ge=1)
    timeout_s: Positive = 1.0
    max_memory_mib: int = Field(default=512, ge=1)

    @model_validator(mode="after")
    def _is_on(self) -> Self:
        if not self.enabled:
            require_unsaid(self, type(self).model_fields.keys() - {"enabled"}, "structured", "enabled is false")
        return self


class Probation(Frozen):
    """What a draft must show after it was loaded.

    Attributes:
        num_prompts: how many golden prompts are generated, from the first.
        tolerance: share of the promised gain over 1.0 (τ on these prompts before registration) that may be missing.
        timeout_s: a draft that takes longer is put back, and retried after as long, then twice as long, and so on.
        put_back_s: seconds that the last good draft may take to be put back; after that speculation is off until it is.
    """

    num_prompts: int = Field(default=8, ge=1)
    tolerance: float = Field(default=0.5, ge=0, lt=1)
    timeout_s: Positive = 300.0
    put_back_s: Positive = 20.0


class Capture(Frozen):
    """What is kept of the hidden states that the target computes for its answers, so that a refresh need not run it.

    Only of requests whose text is logged and was not scrubbed, beside the query log, until a refresh had them.

    Attributes:
        share: of these requests, drawn at random; 0 keeps nothing. It costs one stream nothing that shows, 16 streams
            2%.
        max_disk_mib: size of all files; nothing is added above it.
        max_memory_mib: held in the engine for requests that run; what does not fit is dropped.
        keep_days: files go then at the latest.
    """

    share: float = Field(default=0.0, ge=0, le=1)
    max_disk_mib: Positive = 1024.0
    max_memory_mib: Positive = 256.0
    keep_days: Positive = 7.0

    @property
    def is_on(self) -> bool:
        """Whether anything is kept."""
        return self.share > 0

    @model_validator(mode="after")
    def _is_on(self) -> Self:
        if not self.is_on:
            require_unsaid(self, type(self).model_fields, "capture", "share is 0")
        return self


class Reasoning(Frozen):
    """A small model beside the target, for chats that ask to be answered by both in turn (`X-Redraft-Reasoning`).

    Such an answer is not the target's own. It says so, and is never logged, so that no draft learns from it.

    Attributes:
        model: directory of the small model, which has the target's tokenizer; "" offers no such answers.
        engine: what it runs in, a table as `[engine]`, without a draft; `torch` runs in the replica itself.
        methods: what a request can ask for, by their names.
    """

    model: str = ""
    engine: dict[str, Any] = {"name": "torch"}  # noqa: RUF012 - pydantic copies defaults
    methods: tuple[Annotated[BaseParams, catalog.Method("reasoning")], ...] = Field(
        default_factory=lambda: tuple(catalog.load("reasoning", name).Params() for name in catalog.names("reasoning"))
    )

    @model_validator(mode="after")
    def _can_be_started(self) -> Self:
        if self.model:
            if not Path(self.model).is_dir():
                raise ValueError(f"model {self.model} is no directory")
            params = catalog.parse("engines", self.engine)
            keys = {"num_draft_tokens", "lookup", "lengths", "trees", "nested_confidence", "draft_sample_method"}
            drafting = [key for key in type(params).model_fields if key in keys and getattr(params, key) != 0]
            require_unsaid(params, drafting, "engine", "the small model has no draft")
        else:
            require_unsaid(self, ("engine", "methods"), "reasoning", "there is no model")
        return self


class Autoscaling(Frozen):
    """How many replicas Ray Serve starts, by the requests that they answer; its own names.

    Attributes:
        min_replicas: these always run.
        max_replicas: more never run; 1 leaves the number to `num_replicas`.
        target_ongoing_requests: requests for each replica, those included that wait in it, averaged over half a minute.
            By default half of the engine's `max_num_seqs`, so that one more starts before requests wait.
        upscale_delay_s: how long more replicas must be needed before one is started.
        downscale_delay_s: how long fewer must be needed before one is drained, for `drain_s` at most, and ended.
    """

    min_replicas: int = Field(default=1, ge=1)
    max_replicas: int = Field(default=1, ge=1)
    target_ongoing_requests: Positive | None = None
    upscale_delay_s: float = Field(default=30.0, ge=0, allow_inf_nan=False)
    downscale_delay_s: float = Field(default=600.0, ge=0, allow_inf_nan=False)

    @model_validator(mode="after")
    def _is_on(self) -> Self:
        if self.min_replicas > self.max_replicas:
            raise ValueError(f"min_replicas is {self.min_replicas}, wanted at most max_replicas, {self.max_replicas}")
        if self.max_replicas == 1:
            require_unsaid(self, type(self).model_fields, "autoscaling", "max_replicas is 1")
        return self


class Serve(Frozen):
    """The endpoint. The address to bind is the machine's: REDRAFT_HOST.

    Attributes:
        port: TCP port, 0 takes a free one.
        num_replicas: engines that serve it, each with the whole model, behind Ray's own proxy if there are several.
        autoscaling: as many as the load needs, in the place of `num_replicas`.
        num_gpus: GPUs that Ray reserves for each replica: as many as its engine spreads over, a share below 1 of one
            that engines share (then limit each one's `gpu_memory_utilization`), or 0, so that it sees all. By default 0
            for one replica on a Ray of its own, else as many.
        poll_s: seconds between looks at the registry.
        min_swap_interval_s: seconds between two swaps, at least.
        min_free_memory_gib: memory in GiB that a swap leaves free, at least; until then the new draft waits.
        drain_s: seconds that running requests get when the service ends.
        front: what clients connect to: "haproxy", which bounds connections and how long headers take; "ray", Ray
            Serve's own proxy, which doesn't; "auto" is HAProxy where it runs.
        merge_streams: answers that run at once for each further token that an event of a stream waits for, 4 at most:
            of fewer than so many each step's tokens are sent as they come; 0 never waits.
        seeded: how a request with a seed and a temperature is decoded: "plain", without drafts, "draft", like any
            other, or "auto", without drafts where vLLM drafts by itself and they would change what the seed draws.
        tool_parser: how the target writes tool calls, by the engine's name for it, such as "hermes"; "auto" finds it in
            the chat template, and where that shows no calls that are known, tools are refused, as by "".
        limits: what clients can take.
        structured: whether clients can name the form of an answer.
        probation: the checks after a draft was loaded.
        canary: the checks of the served draft and its engine now and then.
        rollout: how a new champion gets to several replicas, or attached servers.
        drift_detector: when falling acceptance starts a refresh.
        capture: what is kept of hidden states.
        reasoning: a small model that answers in turn with the target, for requests that ask for it.
    """

    port: int = Field(default=8000, ge=0, le=65535)
    num_replicas: int = Field(default=1, ge=1)
    autoscaling: Autoscaling = Autoscaling()
    num_gpus: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    poll_s: Positive = 5.0
    min_swap_interval_s: float = Field(default=10.0, ge=0, allow_inf_nan=False)
    min_free_memory_gib: float = Field(default=0.25, ge=0, allow_inf_nan=False)
    drain_s: Positive = 30.0
    front: Literal["auto", "haproxy", "ray"] = "auto"
    merge_streams: int = Field(default=16, ge=0)
    seeded: Literal["auto", "plain", "draft"] = "auto"
    tool_parser: str = "auto"
    limits: Limits = Limits()
    structured: Structured = Structured()
    probation: Probation = Probation()
    canary: CanaryParams = CanaryParams()
    rollout: RolloutParams = RolloutParams()
    drift_detector: DriftDetector = DriftDetector()
    capture: Capture = Capture()
    reasoning: Reasoning = Reasoning()

    @property
    def most_replicas(self) -> int:
        """How many replicas run at once, at most."""
        return max(self.num_replicas, self.autoscaling.max_replicas)

    @model_validator(mode="after")
    def _can_be_reached(self) -> Self:
        if self.num_replicas > 1 and (most := self.autoscaling.max_replicas) > 1:
            raise ValueError(
                f"num_replicas is {self.num_replicas} and autoscaling.max_replicas is {most}; wanted one of them"
            )
        if self.most_replicas > 1 and self.front == "haproxy":
            raise ValueError(
                f'front is "haproxy", which passes requests on to one replica; of {self.most_replicas}, "ray"'
            )
        return self
