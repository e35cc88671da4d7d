"""A scheduler that plans each step's drafting, and remembers what was drafted and who wrote which keys.

vLLM's own per-request metrics count drafted and accepted tokens but drop their ids and the steps in which nothing was
drafted. The ids are what a draft learns most from, so each verification step leaves with the tokens that it emitted,
since many answers end outside of the scheduler: at a stop string, or when the client goes away. What the planner
expects leaves with a request's first and last output.

How many tokens are drafted is decided here and not in the worker, so that all workers of an engine do the same; the
plan goes to them with the step. vLLM's own hook is used, `scheduler_cls`; all that travels is in `fields`.
"""

import multiprocessing
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from copy import copy
from itertools import islice
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from models.core.evaluation.acceptance import UNDRAFTED
from models.core.throughput.running import DomainShare
from models.engines.vllm import fields
from models.engines.vllm.fields import DRAFTED, GAPS, ROW, Choice, DraftOptions, Row, Setup
from models.engines.vllm.planning import Planner, RequestState, Step


class TracingScheduler(Scheduler):
    """Plans each decoding step, and records (match, number of emitted tokens, drafted ids) of it; see `fields.Row`."""

    def __init__(self, *args: Any, **options: Any) -> None:
        """See the base class; made in the engine's process, also in one that was forked and unpickled nothing."""
        super().__init__(*args, **options)
        if (parent := multiprocessing.parent_process()) is not None and parent.pid is not None:
            fields.end_with(parent.pid)  # its workers follow it by themselves
        speculation: Any = self.vllm_config.speculative_config
        self.draft_keys: DraftKeys | None = None  # None if the draft has no keys
        self._came = False  # whether the runner handed over what it drafted after the last step
        self._beyond: frozenset[str] = frozenset()  # of the last step, those at the end of the draft's context
        self._is_off = False  # speculation is switched off: a draft was planned after the last step, and did not run
        self._ran: tuple[Any, ...] = ()  # requests of the last step
        if speculation is not None and speculation.uses_draft_kv_cache():
            self.draft_keys = DraftKeys(self.kv_cache_manager)
            self._longest = getattr(speculation.draft_model_config, "max_model_len", None) or self.max_model_len
            self._longest -= speculation.use_dflash()  # whose block begins with a token that is certain
        setup = self.vllm_config.additional_config
        self.planner = Planner(setup) if isinstance(setup, Setup) else None  # None where vLLM's own K is all there is
        self.scheduler_config = copy(self.scheduler_config)  # its own: the threshold is another in some steps
        self._longest_piece = self.scheduler_config.long_prefill_token_threshold
        self._began_s = 0.0  # when the step at hand began to be scheduled
        self._step: Step | None = None  # the last one, if another follows it at once; how long it took is known then
        self._rows: Sequence[Row] | None = None  # that were drafted after it

    def schedule(self, *args: Any, **options: Any) -> Any:
        """See the base class."""
        began_s = time.perf_counter()
        if self.planner is not None and self._step is not None:
            self.planner.took(self._step._replace(ms=1000 * (began_s - self._began_s)), self._rows)
        self._began_s, self._step, self._rows = began_s, None, None
        self._settle()  # before the look-ups in the cache
        if self.draft_keys is not None:
            starting = islice(self.waiting, max(0, self.max_num_running_reqs - len(self.running)))
            if not self._is_off and any(DraftOptions.of(one.sampling_params).drafting == "head" for one in starting):
                self.draft_keys.forget_lacking()  # such a request measures the draft by what it makes of whole keys
        # For as long as such a prompt is read, it holds for all that are read beside it.
        unread = [one for one in self.requests.values() if one.num_computed_tokens < one.num_prompt_tokens]
        pieces = filter(None, (DraftOptions.of(one.sampling_params).piece for one in unread))
        self.scheduler_config.long_prefill_token_threshold = min(pieces, default=self._longest_piece)
        output: Any = super().schedule(*args, **options)
        scheduled = output.num_scheduled_tokens
        self._ran = tuple(self.requests[name] for name in scheduled)
        if self.draft_keys is not None:
            ends = {request.request_id: request.num_computed_tokens for request in self._ran}
            self.draft_keys.note({name: (end - scheduled[name], end) for name, end in ends.items()})
            self._beyond = frozenset(name for name, end in ends.items() if end + self.num_spec_tokens > self._longest)
        if self.planner is not None:
            asked = [self._asked(request, scheduled[request.request_id]) for request in self._ran]
            output.num_spec_tokens_to_schedule = self.planner.next(asked, self._is_off)
        return output

    def update_draft_token_ids(self, draft_token_ids: Any) -> None:
        """See the base class; not called after a step whose draft was skipped."""
        self._came = True
        if self.planner is None:
            for place, name in enumerate(draft_token_ids.req_ids):
                off = name in self.requests and DraftOptions.of(self.requests[name].sampling_params).drafting == "off"
                if self._beyond or off:
                    draft_token_ids.draft_token_ids[place] = []  # vLLM itself drafts for all of a step or for none
        elif not draft_token_ids.draft_token_ids:
            return  # it rested, and nothing was looked up
        else:
            rows = [Row.unpacked(row) for row in draft_token_ids.draft_token_ids]
            self._rows = tuple(rows)
            for place, name in enumerate(draft_token_ids.req_ids):
                request = self.requests.get(name)
                if request is None or request.is_prefill_chunk:
                    continue
                draft_options = DraftOptions.of(request.sampling_params)
                self.planner.looked_up(draft_options, rows[place])
                if not rows[place].looked_up:
                    most = self.planner.num_kept(draft_options, GAPS not in request.__dict__)
                    rows[place] = rows[place].cut(most)
                request.__dict__[ROW] = rows[place]
            draft_token_ids.draft_token_ids = [row.token_ids for row in rows]
        super().update_draft_token_ids(draft_token_ids)

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Forget what is cached, at once; the base class refuses to while a request runs, unless that starts anew."""
        if self.draft_keys is None or reset_running_requests:
            return super().reset_prefix_cache(reset_running_requests, reset_connector)
        self._settle()
        for request in self.running:  # of what they have another draft wrote the keys
            request.__dict__[GAPS] = True
        self.draft_keys.forget()
        return self.reset_connector_cache() if reset_connector else True

    def _settle(self) -> None:
        """Say for whom the last step drafted, and wrote the draft's keys; at rest, or with speculation off, nobody."""
        planner, came, beyond = self.planner, self._came, self._beyond
        wrote = came and (planner is None or not planner.drafting.rests)
        looked_up = came and planner is not None and planner.drafting.num_looked_up > 0

        def drafted(name: str) -> bool:
            if planner is None:
                return wrote and not beyond
            return wrote and name not in beyond and planner.drafting.drafts(name)

        if self.draft_keys is not None:
            self.draft_keys.settle(drafted, goes_on=planner is None or not planner.drafting.plan.skip)
        for request in self._ran:
            keys_are_whole, way = drafted(request.request_id), DraftOptions.of(request.sampling_params).drafting
            request.__dict__[DRAFTED] = way != "off" and (keys_are_whole or (looked_up and way == "auto"))
            if not keys_are_whole:
                request.__dict__[GAPS] = True
        if self._ran and planner is not None:
            self._is_off = not planner.drafting.rests and not wrote
        self._came, self._ran = False, ()

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """See the base class."""
        drafts = scheduler_output.scheduled_spec_decode_tokens
        seen = {
            name: (request, request.num_output_tokens)
            for name in scheduler_output.num_scheduled_tokens
            if (request := self.requests.get(name)) is not None
        }
        results = super().update_from_output(scheduler_output, model_runner_output)
        steps: dict[str, list[int]] = {}
        for request_id, (request, before) in seen.items():
            emitted = request.num_output_tokens - before
            if before > 0 and emitted > 0:  # the first token comes from the prefill
                token_ids = [token for token in drafts.get(request_id, ()) if token >= 0]
                row = request.__dict__.get(ROW, fields.NOTHING).cut(len(token_ids))  # fewer may fit the step
                match = row.match if row.looked_up and token_ids else 0
                counts = bool(token_ids) or request.__dict__.get(DRAFTED, True)
                steps[request_id] = [match if counts else UNDRAFTED, emitted, *token_ids]
                if self.planner is not None:
                    whole = GAPS not in request.__dict__
                    self.planner.verified(DraftOptions.of(request.sampling_params), row, emitted - 1, whole)
        if self.planner is not None and seen and self.has_unfinished_requests():
            scheduled = scheduler_output.num_scheduled_tokens
            read = [scheduled[name] for name, (_, before) in seen.items() if before == 0]
            num_rows = scheduler_output.total_num_scheduled_tokens - sum(read)
            verified = {name for name, (_, _, *token_ids) in steps.items() if token_ids}
            self._step = Step(len(seen), num_rows, 0.0, _parts(seen, verified), sum(read), len(read))
        for of_client in results.values():
            for output in of_client.outputs:
                if (name := output.request_id) not in seen:
                    continue
                request, before = seen[name]
                told: dict[str, Any] = {fields.STEP: steps[name]} if name in steps else {}
                if self.planner is not None and (before == 0 or output.finish_reason is not None):
                    domain = DraftOptions.of(request.sampling_params).domain
                    throughput, speed = self.planner.throughput, self.planner.speeds.of(domain)
                    told[fields.THROUGHPUT] = throughput and throughput.model_dump()
                    told[fields.SPEED] = speed and speed.model_dump()
                if told:
                    output.kv_transfer_params = {**(output.kv_transfer_params or {}), **told}
        return results

    def _asked(self, request: Any, num_tokens: int) -> RequestState:
        params = request.sampling_params
        choice: Choice = "sampled" if params.temperature > 0 else "greedy"
        if params.logprobs is not None:
            choice = "logprobs"
        num_read = num_tokens if request.num_output_tokens == 0 else 0
        fits = request.request_id not in self._beyond
        return RequestState(
            DraftOptions.of(params), GAPS not in request.__dict__, choice, request.request_id, num_read, fits
        )


class AsyncDraftScheduler(AsyncScheduler):
    """vLLM's asynchronous scheduler, by which requests can do without a draft, and a swap forgets what is cached.

    The worker drafts by itself and its tokens never come here, so nothing is planned and no step is recorded. The draft
    runs in each step; of requests without a draft none of its tokens is verified. Not run on a GPU, without which vLLM
    schedules synchronously.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        """See the base class."""
        super().__init__(*args, **options)
        speculation: Any = self.vllm_config.speculative_config
        drafts = speculation is not None and speculation.uses_draft_kv_cache()
        self.draft_keys = DraftKeys(self.kv_cache_manager) if drafts else None

    def schedule(self, *args: Any, **options: Any) -> Any:
        """See the base class."""
        if self.draft_keys is not None:
            self.draft_keys.forget_lacking()  # blocks that were in use at a swap, as soon as they are full
        return super().schedule(*args, **options)

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """See the base class, and `TracingScheduler.reset_prefix_cache`."""
        if self.draft_keys is None or reset_running_requests:
            return super().reset_prefix_cache(reset_running_requests, reset_connector)
        self.draft_keys.forget()
        return self.reset_connector_cache() if reset_connector else True

    def _update_after_schedule(self, scheduler_output: Any) -> None:
        """See the base class."""
        super()._update_after_schedule(scheduler_output)
        for name in scheduler_output.num_scheduled_tokens:
            if DraftOptions.of(self.requests[name].sampling_params).drafting == "off":
                self.requests[name].spec_token_ids = []


class DraftKeys:
    """Which blocks of the prefix cache the loaded draft can go on from, followed step by step.

    A block holds the target's keys and the draft's side by side, and vLLM finds it again by its tokens alone. After a
    swap the draft's half is another draft's; where a step ran without a draft it is empty. Neither changes an output,
    both lower acceptance for as long as the block is hit, and a hot system prompt may be hit forever. So such a block
    is forgotten: it is computed anew by the next request that wants it. Requests that already use it keep it. While the
    draft rests they stay, because the target's half is as good as any; they are forgotten when drafting goes on, or
    when a request comes that is drafted all the same.
    """

    def __init__(self, kv_cache_manager: Any) -> None:
        self._managers = kv_cache_manager.coordinator.single_type_managers
        self._pools = list({id(manager.block_pool): manager.block_pool for manager in self._managers}.values())
        self._begun: list[tuple[str, Any]] = []  # with the request that writes it
        self._continued: list[tuple[str, Any]] = []
        self._lacking: dict[int, Any] = {}  # by identity; until written anew from the first position on

    def note(self, step: Mapping[str, tuple[int, int]]) -> None:
        """Remember which blocks the step that was just scheduled writes: of each request's positions [start, end).

        A request that ends in it gives them back.
        """
        for request_id, (start, end) in step.items():
            for manager in self._managers:
                size = manager.block_size
                blocks = manager.req_to_blocks[request_id][start // size : -(-end // size)]
                for number, block in enumerate(blocks, start // size):
                    if not block.is_null:
                        (self._begun if number * size >= start else self._continued).append((request_id, block))

    def settle(self, drafted: Callable[[str], bool], goes_on: bool = True) -> None:
        """Say for which requests the draft ran in that step, and so wrote its keys for all that the step computed.

        `goes_on` says that requests which come next are drafted too, so that they need whole keys.
        """
        written = [(*one, True) for one in self._begun] + [(*one, False) for one in self._continued]
        for request_id, block, begun in written:
            if not drafted(request_id):
                self._lacking[id(block)] = block
            elif begun:
                self._lacking.pop(id(block), None)
        if goes_on and any(drafted(request_id) for request_id, _, _ in written):
            self.forget_lacking()
        self._begun, self._continued = [], []

    def forget(self) -> None:
        """Forget every cached block, and what is not full yet once it is."""
        for pool in self._pools:
            pool.evict_blocks({block.block_id for block in pool.blocks if block.block_hash is not None})
            self._lacking |= {id(block): block for block in pool.blocks if block.ref_cnt > 0 and not block.is_null}

    def forget_lacking(self) -> None:
        """Forget every cached block that lacks the draft's keys."""
        for key, block in list(self._lacking.items()):
            if block.block_hash is not None:
                block.pool.evict_blocks({block.block_id})
            if block.ref_cnt == 0:  # whoever gets it next writes it from its first position
                del self._lacking[key]


def _parts(seen: Mapping[str, tuple[Any, int]], verified: Collection[str]) -> dict[str, DomainShare]:
    """Return what a step had of each domain, by its requests, how many tokens each had before, and of which drafted
    tokens were verified."""
    parts: dict[str, DomainShare] = {}
    for name, (request, before) in seen.items():
        draft_options = DraftOptions.of(request.sampling_params)
        if draft_options.drafting == "auto":  # others say nothing of what is fastest
            num, tokens, spared, drafted = parts.get(draft_options.domain, (0, 0, 0, 0))
            emitted = request.num_output_tokens - before
            parts[draft_options.domain] = DomainShare(
                num + 1, tokens + emitted, spared + max(emitted - 1, 0), drafted + (name in verified)
            )
    return parts
