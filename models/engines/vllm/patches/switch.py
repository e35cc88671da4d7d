"""Switches speculation of a running engine off and on, for good or for a step, and lets it go on at a context's end.

The runner drafts for none of a step in which one sequence would not fit the draft's context, and reports as many
drafted tokens as `num_spec_tokens`. Off, both are 0, so that no draft runs. A step for which nothing was drafted
and after which no draft runs is run as by an engine without one: its tokens are sampled and not verified, and nothing
is prepared for a draft. Targets with recurrent layers keep states by what was verified, and are left alone.

Replaces: `vllm.v1.worker.gpu_model_runner.GPUModelRunner`'s attributes `num_spec_tokens`,
    `effective_drafter_max_model_len` and `speculative_config`, in one runner.
Tried with: vLLM 0.32.
No hook: K of a step can be 0 by the scheduler, but the draft still runs its first pass.
Without it: a step without speculation costs a pass of the draft, 7 to 22% of it, or 6% where no draft runs (one
    sequence, SmolLM2-135M), and one sequence at the end of the draft's context ends drafting for all.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from models.engines.vllm.fields import StepPlan

CONTEXT, CONFIG = "effective_drafter_max_model_len", "speculative_config"
SWITCH = ("num_spec_tokens", CONTEXT)
# Where a runner keeps what both were.
KEPT = "redraft_switch"
# A context that no sequence comes to the end of.
NO_END = 1 << 31


def turn(runner: Any, on: bool) -> None:
    """Draft from the next step on, or don't; the first time, with a runner that drafts."""
    drafting = runner.__dict__.setdefault(KEPT, {name: getattr(runner, name) for name in SWITCH})
    for name in SWITCH:
        setattr(runner, name, drafting[name] if on else 0)


def draft_at_any_length(runner: Any) -> None:
    """Let no sequence be too long for the draft; before it is first turned off."""
    setattr(runner, CONTEXT, NO_END)


def is_plain(runner: Any, scheduler_output: Any) -> bool:
    """Return whether nothing was drafted for a step, and the draft has nothing to do after it."""
    step = scheduler_output.num_spec_tokens_to_schedule
    rests = runner.num_spec_tokens == 0 or (isinstance(step, StepPlan) and step.is_plain)
    return rests and not (scheduler_output.scheduled_spec_decode_tokens or runner.model_config.is_hybrid)


@contextmanager
def without_draft(runner: Any) -> Iterator[None]:
    """Let a runner do in the block as one without a draft."""
    config = getattr(runner, CONFIG)
    setattr(runner, CONFIG, None)
    try:
        yield
    finally:
        setattr(runner, CONFIG, config)
