"""The three checks of a loaded draft: its weights arrived, the output is unchanged, it is as good as promised."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

from infra.registry import Version
from models.acceptance import mean_accepted_length
from models.engines import Completion, Engine, Sampling
from models.golden import Golden, equal_output
from models.params import Frozen
from services.config import Probation

PROBE_TAG = "probe_tau"


class Proof(Frozen):
    """What a draft showed.

    Attributes:
        weight_error: largest relative difference from the file's weights on fixed inputs.
        num_near_ties: golden outputs that differ first where the target itself was undecided.
        tau: mean accepted length on the golden prompts.
        promised_tau: the same, measured before the draft was registered.
    """

    weight_error: float
    num_near_ties: int
    tau: float
    promised_tau: float


async def prove(
    engine: Engine,
    directory: Path,
    version: Version,
    goldens: Sequence[Golden],
    threshold: float,
    settings: Probation,
) -> Proof:
    """Check the draft that the engine just loaded, beside its traffic.

    Args:
        engine: speculating with the draft.
        directory: the draft's files.
        version: its registry entry.
        goldens: the target's reference outputs.
        threshold: near-tie rule of `equal_output`.
        settings: how much is probed and tolerated.

    Raises:
        ValueError: the draft failed; says in what.
    """
    promised = _promised_tau(version)
    error = await engine.check_draft(directory)
    asked = goldens[: settings.num_prompts]
    completions = await _answer(engine, asked, f"probe-{version.number}")
    verdicts = [
        equal_output(golden, completion.token_ids, threshold)
        for golden, completion in zip(asked, completions, strict=True)
    ]
    if "different" in verdicts:
        raise ValueError(f"golden prompt {verdicts.index('different')} gave another output than the target alone")
    traces = [completion.trace("probe") for completion in completions]
    if not any(any(trace.drafted) for trace in traces):
        raise ValueError(f"nothing was drafted on {len(traces)} golden prompts")
    tau = mean_accepted_length(traces)
    wanted = 1 + (promised - 1) * (1 - settings.tolerance)
    if tau < wanted:
        raise ValueError(f"mean accepted length on the golden prompts is {tau:.3f}, promised {promised:.3f}")
    return Proof(weight_error=error, num_near_ties=verdicts.count("near-tie"), tau=tau, promised_tau=promised)


async def _answer(engine: Engine, goldens: Sequence[Golden], name: str) -> list[Completion]:
    """Answer golden prompts side by side, each sent when the one before has been read.

    Every stream waits while the engine reads what came together, so they must not come at once; one after the other
    they would take so many steps that a busy engine does not end in time. When one fails the others are called off.
    """
    turns = [asyncio.Event() for _ in range(len(goldens) + 1)]
    turns[0].set()

    async def answer(index: int, golden: Golden) -> Completion:
        await turns[index].wait()
        sampling = Sampling(max_tokens=len(golden.token_ids))
        return await engine.generate(list(golden.prompt_ids), sampling, f"{name}-{index}", turns[index + 1].set)

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(answer(index, golden)) for index, golden in enumerate(goldens)]
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in tasks]


def _promised_tau(version: Version) -> float:
    text = version.tags.get(PROBE_TAG, "")
    try:
        tau = float(text)
    except ValueError:
        raise ValueError(
            f"tag {PROBE_TAG} is {text!r}, wanted the mean accepted length on the golden prompts"
        ) from None
    if not 1 <= tau < float("inf"):
        raise ValueError(f"tag {PROBE_TAG} is {text}, wanted a number from 1")
    return tau
