"""The three checks of a loaded draft: its weights arrived, the output is unchanged, it is as good as promised."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

from infra.registry import Version
from infra.status import Proof
from models.acceptance import mean_accepted_length
from models.engines import Completion, Engine, Sampling
from models.golden import Golden, equal_output, first_difference
from models.serving import Probation


class TargetDiffers(RuntimeError):
    """The target alone gives another output than its reference too, so that no draft can be judged by it."""


async def prove(
    engine: Engine,
    directory: Path,
    version: Version,
    goldens: Sequence[Golden],
    threshold: float,
    settings: Probation,
) -> Proof:
    """Check the draft that the engine just loaded, beside its traffic.

    Before the draft is blamed for an output, the target alone is asked for it, with the engine's speculation off; other
    requests are not drafted for meanwhile. Speculation is left off then: the caller knows whether it is wanted.

    Args:
        engine: speculating with the draft.
        directory: the draft's files.
        version: its registry entry.
        goldens: the target's reference outputs.
        threshold: near-tie rule of `equal_output`.
        settings: how much is probed and tolerated.

    Raises:
        ValueError: the draft failed; says in what.
        TargetDiffers: the target failed, with or without the draft.
    """
    promised = version.lineage.probe_tau
    if promised is None:
        raise ValueError("tag probe_tau is empty, wanted the mean accepted length on the golden prompts")
    error = await engine.check_draft(directory)
    asked = goldens[: settings.num_prompts]
    completions = await _answer(engine, asked, f"probe-{version.number}")
    verdicts = [
        equal_output(golden, completion.token_ids, threshold)
        for golden, completion in zip(asked, completions, strict=True)
    ]
    if different := [index for index, verdict in enumerate(verdicts) if verdict == "different"]:
        await engine.set_speculation(False)
        alone = await _answer(engine, [asked[index] for index in different], f"probe-{version.number}-alone")
        for index, completion in zip(different, alone, strict=True):
            if _parts_first(asked[index], completions[index], completion):
                raise ValueError(f"golden prompt {index} gave another output than the target alone")
        raise TargetDiffers(f"the target alone parts from its reference too, on {len(alone)} golden prompts")
    traces = [completion.trace("probe") for completion in completions]
    if not any(any(trace.drafted) for trace in traces):
        raise ValueError(f"nothing was drafted on {len(traces)} golden prompts")
    tau = mean_accepted_length(traces)
    wanted = 1 + (promised - 1) * (1 - settings.tolerance)
    if tau < wanted:
        raise ValueError(f"mean accepted length on the golden prompts is {tau:.3f}, promised {promised:.3f}")
    return Proof(weight_error=error, num_near_ties=verdicts.count("near-tie"), tau=tau, promised_tau=promised)


def _parts_first(golden: Golden, drafted: Completion, alone: Completion) -> bool:
    """Whether an output parts from the reference where the target alone still follows it."""
    of_both = (first_difference(golden.token_ids, one.token_ids) for one in (drafted, alone))
    drafted_parts, alone_parts = (len(golden.token_ids) if at is None else at for at in of_both)
    return drafted_parts < alone_parts


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
