"""A scheduler that remembers what was drafted, in a process that ends with the one that asked for it.

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

STEPS = "redraft_steps"
PR_SET_PDEATHSIG = 1


class TracingScheduler(Scheduler):
    """Records (drafted ids, number of emitted tokens) for each decoding step."""

    def __init__(self, *args: Any, **options: Any) -> None:
        """See the base class; made in the engine's process, which no one could stop after the parent's kill -9."""
        super().__init__(*args, **options)
        if multiprocessing.parent_process() is not None:
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # its workers follow it by themselves

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
