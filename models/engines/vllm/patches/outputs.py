"""Keeps what the scheduler tells of each request, step by step, so that an answer has it wherever it ends.

An answer may end at a stop string, behind the scheduler, and not all of its outputs are handed on.

Replaces: `vllm.v1.engine.async_llm.OutputProcessor`.
Tried with: vLLM 0.32.
No hook: AsyncLLM makes its processor itself; metrics of an answer count tokens, and have neither ids nor empty steps.
Without it: answers that end at a stop string, and those that are not streamed, tell nothing of their steps, and clients
    are sent what the scheduler told.
"""

from typing import Any

from vllm.v1.engine import async_llm
from vllm.v1.engine.output_processor import OutputProcessor

from models.engines.vllm.fields import SPEED, STEP, STEPS, THROUGHPUT, TOLD


def install() -> None:
    """Let engines that are made from now on do so."""
    module: Any = async_llm
    module.OutputProcessor = Steps


class Steps(OutputProcessor):
    """vLLM's own, which passes on with each output all that came for its request so far."""

    def process_outputs(self, engine_core_outputs: list[Any], *args: Any, **kwargs: Any) -> Any:
        """See the base class, which ends an answer at a stop string."""
        for output in engine_core_outputs:
            if (state := self.request_states.get(output.request_id)) is not None:
                came, told = output.kv_transfer_params or {}, state.__dict__.setdefault(TOLD, {STEPS: []})
                if (step := came.pop(STEP, None)) is not None:
                    told[STEPS].append(step)
                told.update({name: came.pop(name) for name in (THROUGHPUT, SPEED) if name in came})
                output.kv_transfer_params = {**came, TOLD: told}
        return super().process_outputs(engine_core_outputs, *args, **kwargs)
