"""What is asked and told of each request: AsyncLLM with a tap, which counts what the verification rule accepted."""

import time
from collections.abc import AsyncGenerator, Callable, Iterator
from http import HTTPStatus
from typing import Any, cast

from vllm import SamplingParams
from vllm.exceptions import GracefulHTTPError, VLLMValidationError
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from models import catalog
from models.engines import Completion, Rules, Way
from models.engines.vllm.fields import (
    OPTIONS,
    SPEED,
    STEPS,
    STRUCTURED,
    THROUGHPUT,
    TOLD,
    DraftOptions,
    PlannedThroughput,
)
from models.engines.vllm.grammars import Grammars
from models.types import Speed

# Tokens that an event of a stream waits for, at most: it comes four steps late.
MOST_MERGED = 4

OnFinish = Callable[[Completion, SamplingParams], None]
OptionsOf = Callable[[str, SamplingParams], DraftOptions]


class EngineEnded(GracefulHTTPError):
    """The engine ended before an answer did."""

    STATUS = HTTPStatus.BAD_GATEWAY  # which nothing else that vLLM answers has, in its streams too

    def __init__(self) -> None:
        super().__init__("the engine has ended", self.STATUS)


class InstrumentedLLM(AsyncLLM):
    """AsyncLLM that asks how a request is to be drafted, and tells of every answer that has ended, aborted ones too.

    What the planner expects is that of when a request ended last, or when one began that ended at a stop string.
    """

    on_finish: OnFinish | None = None  # is told; not of requests for several answers
    options_of: OptionsOf | None = None  # is asked by a request's id and parameters; else it is drafted as is fastest
    draft_version: str = ""
    speculating: bool = False
    undrafted: bool = False  # nothing is verified of what is drafted for requests that begin
    rules: Rules
    throughput: PlannedThroughput | None = None  # which the planner expected
    grammars: Grammars | None = None  # takes or refuses what constrains an answer; without it all is taken
    num_swaps: int = 0  # drafts that were swapped in
    merge_streams: int = 0  # requests that run for each further token that a streamed event waits for; 0 never waits

    def __init__(self, *args: Any, **options: Any) -> None:
        """See the base class."""
        self.speeds: dict[str, Speed] = {}  # by domain; of structured answers as "DOMAIN/structured"
        self._num_running = 0
        super().__init__(*args, **options)

    def __del__(self) -> None:
        """Nothing: `VllmEngine.close` ends the engine, and at the interpreter's end what the base calls is gone."""

    @property
    def dead_error(self) -> BaseException:
        """What whoever finds the engine gone is to raise, in place of the base class's error."""
        return EngineEnded()

    async def add_request(self, *args: Any, **kwargs: Any) -> Any:
        """See the base class; raises EngineEnded where vLLM would call the engine's end a failure of the request."""
        try:
            return await super().add_request(*args, **kwargs)
        except Exception as error:
            if self.errored:
                raise EngineEnded from error
            raise

    async def generate(
        self,
        prompt: Any,
        sampling_params: SamplingParams,
        request_id: str,
        draft_options: DraftOptions | None = None,
        **kwargs: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """See the base class; what a client put where `draft_options` travel is overwritten.

        Raises:
            VLLMValidationError: what constrains the answer is refused, or leads nowhere.
            EngineEnded: the engine is gone, or broke the answer off, as it does to all when it is told to end; vLLM
                would pass on what there is as a whole answer, with finish reason "abort".
        """
        if self.grammars is not None and sampling_params.structured_outputs is not None:
            sampling_params.structured_outputs = await self.grammars.require(sampling_params.structured_outputs)
        if draft_options is None:
            asks = self.options_of
            draft_options = DraftOptions("auto") if asks is None else asks(request_id, sampling_params)
        if sampling_params.structured_outputs is not None:  # a grammar takes away what was drafted against it
            draft_options = draft_options._replace(domain=f"{draft_options.domain}/{STRUCTURED}", promised=0.0)
        if self.undrafted:
            draft_options = draft_options._replace(drafting="off")
        draft_options = draft_options._replace(
            num_swaps=self.num_swaps, capture=draft_options.capture if sampling_params.n == 1 else ""
        )
        sampling_params.extra_args = {**(sampling_params.extra_args or {}), OPTIONS: draft_options}
        self._merge(sampling_params)
        tap = _Tap(request_id, sampling_params, draft_options, self)
        several = sampling_params.n > 1  # which share one stream, so there is no single one to tell of
        self._num_running += 1
        try:
            async for output in super().generate(prompt, sampling_params, request_id, **kwargs):
                if several:
                    output.kv_transfer_params = None
                else:
                    tap.see(output)
                _require_unbroken(output, sampling_params)
                if output.finished and not several:
                    answered: Any = output  # it carries the completion to `VllmEngine.generate`
                    answered.completion = tap.completion()
                    tap.ended = True
                    self._tell(answered.completion, sampling_params)
                yield output
        except EngineDeadError as error:
            raise EngineEnded from error
        finally:
            self._num_running -= 1
            if not tap.ended and tap.token_ids:  # the client went away
                self._tell(tap.completion(), sampling_params)

    def _merge(self, sampling_params: SamplingParams) -> None:
        """Let a stream that begins beside many others send several tokens at once; its first one goes out as it comes.

        An event takes this process about as long for one token as for four, on cores that the engine's threads share:
        of 64 streams a token took 0.050 ms of CPU time instead of 0.065, of 16 streams 0.09 either way (two-layer
        target, AMD EPYC).
        """
        if self.merge_streams and sampling_params.output_kind == RequestOutputKind.DELTA:
            merged = min(1 + self._num_running // self.merge_streams, MOST_MERGED)
            sampling_params.stream_interval = max(merged, sampling_params.stream_interval or 1)

    def _tell(self, completion: Completion, sampling_params: SamplingParams) -> None:
        if self.on_finish is not None:
            self.on_finish(completion, sampling_params)


def is_seeded(params: SamplingParams) -> bool:
    """Whether a seed decides what a request is answered."""
    return params.seed is not None and params.temperature > 0


def tells_of_draft(params: SamplingParams) -> bool:
    """Whether what is accepted in a request's answer says how good a draft is: one token has no step to be drafted."""
    return params.max_tokens != 1 and params.structured_outputs is None


def _require_unbroken(output: RequestOutput, sampling_params: SamplingParams) -> None:
    reasons = {answer.finish_reason for answer in output.outputs}
    if "abort" in reasons:
        raise EngineEnded
    if "error" in reasons and sampling_params.structured_outputs is not None:
        raise VLLMValidationError("no answer can be of this form: its grammar leads where no token may follow")


class _Tap:
    """Collects one request's outputs, whether they come whole, cumulative or as deltas."""

    def __init__(
        self, request_id: str, sampling: SamplingParams, draft_options: DraftOptions, llm: InstrumentedLLM
    ) -> None:
        self.request_id, self.sampling, self.llm = request_id, sampling, llm
        self.drafting, self.domain = cast("Way", draft_options.drafting), draft_options.domain
        self.count_accepted = catalog.load("verify", llm.rules.at(sampling.temperature).name).count_accepted
        self.draft_version, self.speculating = llm.draft_version, llm.speculating
        self.started, self.first_token = time.monotonic(), 0.0
        self.last_token = self.started
        self.prompt_ids: tuple[int, ...] = ()
        self.token_ids: list[int] = []
        self.gaps: list[float] = []
        self.told: dict[str, Any] = {}
        self.counted: Any = None  # by vLLM itself, in detail; at the end of an answer
        self.finish_reason: str | None = None
        self.ended = False

    def see(self, output: RequestOutput) -> None:
        self.prompt_ids = self.prompt_ids or tuple(output.prompt_token_ids or ())
        answer, came = output.outputs[0], output.kv_transfer_params or {}
        self.told = came.pop(TOLD, self.told)
        output.kv_transfer_params = came or None  # the rest is for the client
        delta = self.sampling.output_kind == RequestOutputKind.DELTA
        if not delta:
            self.token_ids.clear()
        self.token_ids += answer.token_ids
        if answer.logprobs and (self.sampling.logprobs or 0) >= 2:
            self.gaps += [_gap(position) for position in answer.logprobs[0 if delta else len(self.gaps) :]]
        if self.token_ids:
            self.last_token = time.monotonic()
            self.first_token = self.first_token or self.last_token
        if answer.finish_reason is not None:
            self.finish_reason, self.counted = answer.finish_reason, answer.spec_decode_metrics
            if (stats := output.metrics) is not None:  # an answer that comes whole is seen when its last token is there
                self.first_token = self.started + stats.first_token_latency
                self.last_token = self.first_token + stats.last_token_ts - stats.first_token_ts
            if throughput := self.told.get(THROUGHPUT):
                self.llm.throughput = PlannedThroughput(**throughput)
            if speed := self.told.get(SPEED):
                self.llm.speeds[self.domain] = Speed(**speed)

    def completion(self) -> Completion:
        steps = [*self._until_the_end()]
        num_later = max(len(self.token_ids) - 1, 1)
        drafted = tuple(len(ids) for _, _, ids in steps)
        accepted = tuple(self.count_accepted(ids, emitted) for _, emitted, ids in steps)
        if not steps and self.counted is not None:  # the scheduler does not know the drafted tokens' ids
            drafted, accepted = tuple(self.counted.per_step_drafted), tuple(self.counted.per_step_accepted)
        return Completion(
            request_id=self.request_id,
            prompt_ids=self.prompt_ids,
            token_ids=tuple(self.token_ids),
            drafted=drafted,
            accepted=accepted,
            drafted_ids=tuple(tuple(ids) for _, _, ids in steps),
            matches=tuple(match for match, _, _ in steps),
            finish_reason=self.finish_reason,
            first_token_ms=1000 * max(self.first_token - self.started, 0.0),
            per_token_ms=1000 * max(self.last_token - self.first_token, 0.0) / num_later,
            draft_version=self.draft_version,
            speculating=self.speculating,
            drafting=self.drafting,
            gaps=tuple(self.gaps),
            structured=self.sampling.structured_outputs is not None,
        )

    def _until_the_end(self) -> Iterator[tuple[int, list[int], list[int]]]:
        """Yield match, emitted and drafted tokens of the steps that the answer has tokens of; its first is no step's.

        A stop string cuts the last of them off, and more may have been decoded than a client that went away was sent.
        """
        position = 1
        for match, num_emitted, *drafted in self.told.get(STEPS, ()):
            if position >= len(self.token_ids):
                return
            yield match, self.token_ids[position : position + num_emitted], drafted
            position += num_emitted


def _gap(position: dict[int, Any]) -> float:
    best = sorted((entry.logprob for entry in position.values()), reverse=True)
    return float(best[0] - best[1]) if len(best) > 1 else float("inf")
