"""How a service serves: table [serve] of a recipe, and part of what a service is started with."""

from typing import Annotated

from pydantic import Field

from models.canary import Params as CanaryParams
from models.params import Frozen
from models.watch import Params as WatchParams

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Limits(Frozen):
    """What clients can take of a service.

    Attributes:
        max_ongoing_requests: requests in the engine at once.
        max_queued_requests: requests that wait in the proxy; above it the answer is 503.
        max_body_bytes: largest request body.
        body_timeout_s: seconds that a body may take to arrive.
    """

    max_ongoing_requests: int = Field(default=64, ge=1)
    max_queued_requests: int = Field(default=256, ge=0)
    max_body_bytes: int = Field(default=1 << 20, ge=1)
    body_timeout_s: Positive = 30.0


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


class Serving(Frozen):
    """How a service serves, wherever it listens.

    Attributes:
        poll_s: seconds between looks at the registry.
        min_swap_interval_s: seconds between two swaps, at least.
        drain_s: seconds that running requests get when the service ends.
        tool_parser: how the target writes tool calls, by the engine's name for it, such as "hermes"; "" refuses tools.
        limits: what clients can take.
        probation: the checks after a draft was loaded.
        canary: the checks of the served draft and its engine now and then.
        watch: when falling acceptance starts a refresh.
    """

    poll_s: Positive = 5.0
    min_swap_interval_s: float = Field(default=10.0, ge=0, allow_inf_nan=False)
    drain_s: Positive = 30.0
    tool_parser: str = ""
    limits: Limits = Limits()
    probation: Probation = Probation()
    canary: CanaryParams = CanaryParams()
    watch: WatchParams = WatchParams()


class Serve(Serving):
    """The endpoint. The address to bind is the machine's: REDRAFT_HOST.

    Attributes:
        port: TCP port, 0 takes a free one.
    """

    port: int = Field(default=8000, ge=0, le=65535)
