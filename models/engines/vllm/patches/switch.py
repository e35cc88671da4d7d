"""Switches speculation of a running engine off and on, and lets it go on where a draft's context ends.

The runner drafts for none of a step in which one sequence would not fit the draft's context, and reports as many
drafted tokens as `num_spec_tokens`. Off, both are 0, so that no draft runs and a step is a plain one.

Replaces: `vllm.v1.worker.gpu_model_runner.GPUModelRunner`'s attributes `num_spec_tokens` and
    `effective_drafter_max_model_len`, in one runner.
Tried with: vLLM 0.32.
No hook: K of a step can be 0 by the scheduler, but the draft still runs its first pass.
Without it: a step without speculation costs a pass of the draft, 7 to 22% of it, and one sequence at the end of the
    draft's context ends drafting for all.
"""

from typing import Any

CONTEXT = "effective_drafter_max_model_len"
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
