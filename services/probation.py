"""Probation, and the canary prompts later: what an engine answers with a draft to prompts whose outputs are known."""

import asyncio
from collections.abc import Callable, Sequence

from infra.status import Proof
from models.core.evaluation.acceptance import mean_accepted_length
from models.core.evaluation.golden import (
    Answer,
    CanaryParams,
    Finding,
    Golden,
    equal_output,
    first_difference,
    has_fallen,
    judge,
    lost_on_canaries,
)
from models.engines import Completion, Engine, NotSwitchable, Sampling
from models.serving import Probation
from services.drafts import Loaded

# Turns in a full engine; requests have 0. A probation is short, and until it ends an unproven draft serves; canary
# prompts come after every request, whose turn is how many sequences their key runs.
FIRST, LAST = -1, 1 << 16
NUM_LOOKS = 2
# Tokens of a golden prompt that are read in one step: every stream waits for each of them.
PIECE = 64


class TargetDiffers(RuntimeError):
    """The target alone gives another output than its reference too, so that no draft can be tested by it."""


class GoldenPrompts:
    """What an engine answers with a draft, against the target's reference outputs and their near-tie threshold.

    Before a draft is blamed for an output, the target alone is asked for it, with the engine's speculation off; other
    requests are not drafted for meanwhile. Speculation is left off then: the caller knows whether it is wanted.
    """

    def __init__(self, engine: Engine, goldens: Sequence[Golden], threshold: float) -> None:
        self._engine, self._goldens, self._threshold = engine, goldens, threshold

    async def prove(self, draft: Loaded, settings: Probation) -> tuple[Proof, tuple[Answer, ...]]:
        """Check a draft that was just loaded, ahead of the traffic that waits; ValueError says in what it failed.

        TargetDiffers: the target failed, with or without the draft.
        """
        promised = draft.version.lineage.golden_tau
        if promised is None:
            raise ValueError("tag golden_tau is empty, wanted the mean accepted length on the golden prompts")
        error = await self._engine.check_draft(draft.directory)
        asked, name = self._goldens[: settings.num_prompts], f"golden-{draft.version.number}"
        completions = await self._answer(asked, name, FIRST)
        verdicts = self._verdicts(asked, completions)
        if "different" in verdicts:
            if (own := await self._differs_itself(asked, completions, name, FIRST)) is not None:
                raise ValueError(f"golden prompt {own} gave another output than the target alone")
            num_parting = verdicts.count("different")
            raise TargetDiffers(f"the target alone parts from its reference too, on {num_parting} golden prompts")
        traces = [completion.trace("golden") for completion in completions]
        if not any(any(trace.drafted) for trace in traces):
            raise ValueError(f"nothing was drafted on {len(traces)} golden prompts")
        tau, wanted = mean_accepted_length(traces), 1 + (promised - 1) * (1 - settings.tolerance)
        if tau < wanted:
            raise ValueError(f"mean accepted length on the golden prompts is {tau:.3f}, promised {promised:.3f}")
        proof = Proof(weight_error=error, num_near_ties=verdicts.count("near-tie"), tau=tau, promised_tau=promised)
        return proof, _answers(completions)

    async def look(
        self,
        number: int,
        reference: Sequence[Answer],
        lost_on_traffic: Callable[[], float | None],
        params: CanaryParams,
    ) -> tuple[Finding, str]:
        """Ask the served draft the canary prompts, after all traffic, and say what was found, in a word and in a line.

        A fall is believed when a second look sees it. `reference` is what the draft answered on probation;
        `lost_on_traffic` returns the share of the promised gain that is missing.
        """
        asked, name, lost = self._goldens[: len(reference)], f"golden-{number}-canary", None
        for _ in range(NUM_LOOKS):
            completions: list[Completion] = []
            for golden in asked:  # one at a time, so that a user shares the engine with one of them at most
                completions += await self._answer([golden], f"{name}-{len(completions)}", LAST)
            if "different" in self._verdicts(asked, completions):
                if (own := await self._differs_itself(asked, completions, name, LAST)) is None:
                    return Finding.TARGET, "the target alone parts from its reference on a canary prompt"
                return Finding.PAIR, f"with draft {number} canary prompt {own} gives another output"
            lost = lost_on_canaries(reference, _answers(completions))
            if not has_fallen(lost, params):
                return Finding.SOUND, ""
        traffic = lost_on_traffic()
        said = "too little traffic to say" if traffic is None else f"{traffic:.0%} on traffic"
        return judge(lost, traffic, params), f"draft {number} lost {lost:.0%} on canary prompts, {said}"

    def _verdicts(self, asked: Sequence[Golden], completions: Sequence[Completion]) -> list[str]:
        pairs = zip(asked, completions, strict=True)
        return [equal_output(golden, one.token_ids, self._threshold) for golden, one in pairs]

    async def _differs_itself(
        self, asked: Sequence[Golden], completions: Sequence[Completion], name: str, priority: int
    ) -> int | None:
        """Return the first prompt that the draft alone answers otherwise; None if the target does too."""
        verdicts = enumerate(self._verdicts(asked, completions))
        different = [index for index, verdict in verdicts if verdict == "different"]
        try:
            await self._engine.set_speculation(False)
        except NotSwitchable as error:  # a target of other arithmetic is no fault of the draft's
            message = f"golden prompt {different[0]} gave another output, of unknown cause: {error}"
            raise TargetDiffers(message) from error
        alone = await self._answer([asked[index] for index in different], f"{name}-alone", priority)
        pairs = zip(different, alone, strict=True)
        return next((index for index, one in pairs if _parts_first(asked[index], completions[index], one)), None)

    async def _answer(self, goldens: Sequence[Golden], name: str, priority: int) -> list[Completion]:
        """Answer golden prompts side by side, each sent when the one before has been read.

        Every stream waits while the engine reads what came together, and one after the other they would take too many
        steps. When one fails the others are called off.
        """
        turns = [asyncio.Event() for _ in range(len(goldens) + 1)]
        turns[0].set()

        async def ask(index: int, golden: Golden) -> Completion:
            await turns[index].wait()
            sampling = Sampling(max_tokens=len(golden.token_ids), priority=priority, piece=PIECE)
            read = turns[index + 1].set
            return await self._engine.generate(list(golden.prompt_ids), sampling, f"{name}-{index}", read)

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(ask(index, golden)) for index, golden in enumerate(goldens)]
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        return [task.result() for task in tasks]


def _answers(completions: Sequence[Completion]) -> tuple[Answer, ...]:
    """Return what later answers to the same prompts are held against."""
    return tuple(Answer(one.token_ids, one.drafted, one.accepted) for one in completions)


def _parts_first(golden: Golden, drafted: Completion, alone: Completion) -> bool:
    """Whether an output parts from the reference where the target alone still follows it."""
    of_both = (first_difference(golden.token_ids, one.token_ids) for one in (drafted, alone))
    drafted_parts, alone_parts = (len(golden.token_ids) if at is None else at for at in of_both)
    return drafted_parts < alone_parts
