"""The three checks of a loaded draft: its weights arrived, the output is unchanged, it is as good as promised."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from infra.status import Proof
from infra.versions import Version
from models.engines import Completion, Engine, Sampling
from models.evaluation.acceptance import mean_accepted_length
from models.evaluation.canary import Answer
from models.evaluation.golden import Golden, equal_output, first_difference
from models.serving import Probation

# Turns in a full engine; requests have 0. A probation is short, and until it ends an unproven draft serves.
FIRST = -1
# Tokens of a golden prompt that are read in one step: every stream waits for each of them.
PIECE = 64


class Proven(NamedTuple):
    """What a draft showed on probation, and what it answered."""

    proof: Proof
    answers: tuple[Answer, ...]


class TargetDiffers(RuntimeError):
    """The target alone gives another output than its reference too, so that no draft can be judged by it."""


async def prove(
    engine: Engine,
    directory: Path,
    version: Version,
    goldens: Sequence[Golden],
    threshold: float,
    settings: Probation,
) -> Proven:
    """Check the draft that the engine just loaded, ahead of the traffic that waits.

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
    name = f"probe-{version.number}"
    completions = await answer(engine, asked, name, FIRST)
    verdicts = [
        equal_output(golden, completion.token_ids, threshold)
        for golden, completion in zip(asked, completions, strict=True)
    ]
    if "different" in verdicts:
        if (own := await differs_itself(engine, asked, completions, threshold, name, FIRST)) is not None:
            raise ValueError(f"golden prompt {own} gave another output than the target alone")
        num_parting = verdicts.count("different")
        raise TargetDiffers(f"the target alone parts from its reference too, on {num_parting} golden prompts")
    traces = [completion.trace("probe") for completion in completions]
    if not any(any(trace.drafted) for trace in traces):
        raise ValueError(f"nothing was drafted on {len(traces)} golden prompts")
    tau = mean_accepted_length(traces)
    wanted = 1 + (promised - 1) * (1 - settings.tolerance)
    if tau < wanted:
        raise ValueError(f"mean accepted length on the golden prompts is {tau:.3f}, promised {promised:.3f}")
    proof = Proof(weight_error=error, num_near_ties=verdicts.count("near-tie"), tau=tau, promised_tau=promised)
    return Proven(proof, answers(completions))


def answers(completions: Sequence[Completion]) -> tuple[Answer, ...]:
    """Return what later answers to the same prompts are held against."""
    return tuple(Answer(one.token_ids, one.drafted, one.accepted) for one in completions)


async def differs_itself(
    engine: Engine,
    asked: Sequence[Golden],
    completions: Sequence[Completion],
    threshold: float,
    name: str,
    priority: int,
) -> int | None:
    """Ask the target alone for the outputs that differ from the reference; leaves speculation off.

    Args:
        engine: with the draft that answered.
        asked: the golden prompts.
        completions: their answers with the draft.
        threshold: near-tie rule of `equal_output`.
        name: what the requests are called.
        priority: their turn.

    Returns:
        The first prompt that the draft, and not the target, answers otherwise; None if the target does too.
    """
    different = [
        index
        for index, (golden, completion) in enumerate(zip(asked, completions, strict=True))
        if equal_output(golden, completion.token_ids, threshold) == "different"
    ]
    await engine.set_speculation(False)
    alone = await answer(engine, [asked[index] for index in different], f"{name}-alone", priority)
    pairs = zip(different, alone, strict=True)
    return next((index for index, one in pairs if _parts_first(asked[index], completions[index], one)), None)


def _parts_first(golden: Golden, drafted: Completion, alone: Completion) -> bool:
    """Whether an output parts from the reference where the target alone still follows it."""
    of_both = (first_difference(golden.token_ids, one.token_ids) for one in (drafted, alone))
    drafted_parts, alone_parts = (len(golden.token_ids) if at is None else at for at in of_both)
    return drafted_parts < alone_parts


async def answer(engine: Engine, goldens: Sequence[Golden], name: str, priority: int) -> list[Completion]:
    """Answer golden prompts side by side, each sent when the one before has been read.

    Every stream waits while the engine reads what came together, so they must not come at once; one after the other
    they would take so many steps that a busy engine does not end in time. When one fails the others are called off.
    """
    turns = [asyncio.Event() for _ in range(len(goldens) + 1)]
    turns[0].set()

    async def ask(index: int, golden: Golden) -> Completion:
        await turns[index].wait()
        sampling = Sampling(max_tokens=len(golden.token_ids), priority=priority, piece=PIECE)
        return await engine.generate(list(golden.prompt_ids), sampling, f"{name}-{index}", turns[index + 1].set)

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(ask(index, golden)) for index, golden in enumerate(goldens)]
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in tasks]
