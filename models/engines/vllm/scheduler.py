"""A scheduler that remembers what was drafted and who wrote which keys, and ends with the process that asked for it.

vLLM's own per-request metrics count drafted and accepted tokens but drop their ids and the steps in which nothing was
drafted. The ids are what a draft learns most from, so each request keeps a list of its verification steps, which leaves
with its last output. The only open field of that output is `kv_transfer_params`; `models.engines.vllm.engine` takes the
list out again.
"""

import ctypes
import multiprocessing
import signal
from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler

from models.engines.vllm.draft_keys import DraftKeys, Written

STEPS = "redraft_steps"
PR_SET_PDEATHSIG = 1


class TracingScheduler(Scheduler):
    """Records (drafted ids, number of emitted tokens) for each decoding step.

    Attributes:
        draft_keys: which cached blocks the draft can go on from; None if it has no keys.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        """See the base class; made in the engine's process, which no one could stop after the parent's kill -9."""
        super().__init__(*args, **options)
        if multiprocessing.parent_process() is not None:
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # its workers follow it by themselves
        speculation: Any = self.vllm_config.speculative_config
        self.draft_keys: DraftKeys | None = None
        self._drafted = False  # whether the runner handed over what it drafted after the last step
        self._fits = True
        if speculation is not None and speculation.uses_draft_kv_cache():
            self.draft_keys = DraftKeys(self.kv_cache_manager)
            self._longest = getattr(speculation.draft_model_config, "max_model_len", None) or self.max_model_len

    def schedule(self, *args: Any, **options: Any) -> Any:
        """See the base class."""
        if self.draft_keys is None:
            return super().schedule(*args, **options)
        self._settle(self.draft_keys)  # before the look-ups in the cache
        output = super().schedule(*args, **options)
        ends = {name: self.requests[name].num_computed_tokens for name in output.num_scheduled_tokens}
        self.draft_keys.note(
            Written(name, ends[name] - num, ends[name]) for name, num in output.num_scheduled_tokens.items()
        )
        # The runner drafts for no request of a step if one has come to the end of the draft's context.
        self._fits = max(ends.values(), default=0) + self.num_spec_tokens <= self._longest
        return output

    def update_draft_token_ids(self, draft_token_ids: Any) -> None:
        """See the base class; not called after a step whose draft was skipped."""
        self._drafted = True
        super().update_draft_token_ids(draft_token_ids)

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Forget what is cached, at once; the base class refuses to while a request runs, unless that starts anew."""
        if self.draft_keys is None or reset_running_requests:
            return super().reset_prefix_cache(reset_running_requests, reset_connector)
        self._settle(self.draft_keys)
        self.draft_keys.forget()
        return self.reset_connector_cache() if reset_connector else True

    def _settle(self, draft_keys: DraftKeys) -> None:
        draft_keys.settle(self._drafted and self._fits)
        self._drafted = False

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """See the base class."""
        seen = {}
        for request_id in scheduler_output.num_scheduled_tokens:
            request = self.requests.get(request_id)
            if request is not None:
                seen[request_id] = (request, request.num_output_tokens)
        results = super().update_from_output(scheduler_output, model_runner_output)
        drafts = scheduler_output.scheduled_spec_decode_tokens
        for request_id, (request, before) in seen.items():
            emitted = request.num_output_tokens - before
            if before > 0 and emitted > 0:  # the first token comes from the prefill
                steps = request.__dict__.setdefault(STEPS, [])
                steps.append([emitted, *(token for token in drafts.get(request_id, ()) if token >= 0)])
        for outputs in results.values():
            for output in outputs.outputs:
                if output.finish_reason is not None and output.request_id in seen:
                    request, _ = seen[output.request_id]
                    output.kv_transfer_params = {
                        **(output.kv_transfer_params or {}),
                        STEPS: request.__dict__.get(STEPS, []),
                    }
        return results
