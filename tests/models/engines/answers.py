"""Answers of an engine, and what they are held to: those without a draft, scores, and states of the target."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from models.core.evaluation import scoring
from models.core.evaluation.golden import Golden, equal_output
from models.core.learning.captured import read
from models.core.learning.hidden import HiddenStates, Sample
from models.drafts import Draft
from models.engines import Completion, Engine, Sampling
from models.engines.vllm.capture import Claim


async def answer_all(
    engine: Engine, asked: Sequence[list[int]], sampling: Sampling, concurrency: int, tag: str
) -> list[Completion]:
    """Ask prompts, so many at once."""
    gate = asyncio.Semaphore(concurrency)

    async def answer(number: int, prompt: list[int]) -> Completion:
        async with gate:
            return await engine.generate(prompt, sampling, f"{tag}-{number}")

    return list(await asyncio.gather(*(answer(number, prompt) for number, prompt in enumerate(asked))))


async def last_of(engine: Any, prompt: list[int], sampling: Any, name: str, *options: Any) -> Any:
    """Return the last output of a vLLM engine for a prompt."""
    async for output in engine.llm.generate({"prompt_token_ids": prompt}, sampling, name, *options):
        last = output
    return last


def golden_of(answers: Sequence[Completion]) -> list[Golden]:
    return [Golden(prompt_ids=one.prompt_ids, token_ids=one.token_ids, gaps=one.gaps) for one in answers]


def require_none_different(
    golden: Sequence[Golden], answers: Sequence[Completion], threshold: float, least_equal: float = 0.0
) -> None:
    """Fail where an answer parts from what it is held to otherwise than at a near tie, or too many do at one."""
    verdicts = Counter(equal_output(g, one.token_ids, threshold) for g, one in zip(golden, answers, strict=True))
    assert verdicts["different"] == 0 and verdicts["equal"] >= least_equal * len(golden), verdicts


def require_steps(answers: Sequence[Completion]) -> None:
    """Fail where the tokens of an answer are not those that its steps accepted, and one more of each."""
    for one in answers:
        position = 1
        for drafted, accepted in zip(one.drafted_ids, one.accepted, strict=True):
            assert tuple(one.token_ids[position : position + accepted]) == drafted[:accepted]
            position += accepted + 1
        # The last step may have been cut by the token limit; before it every step emits one token more than it accepts.
        assert position - 1 <= len(one.token_ids) <= position
        assert one.trace("tiny").accepted == one.accepted


def samples_of(answers: Sequence[Completion]) -> list[Sample]:
    return [Sample(one.request_id, "chat", list(one.prompt_ids), list(one.token_ids)) for one in answers]


def num_scored_alike(draft: Draft, target: Path, answers: Sequence[Completion], folder: Path) -> int:
    """Count the answers of which scoring without an engine, at K = 3, counts the steps and accepted tokens of one."""
    scores = scoring.score(draft, target, samples_of(answers), 3, folder)
    counts = [(len(one.drafted), sum(one.accepted)) for one in answers]
    return sum((one.steps, one.accepted) == count for one, count in zip(scores, counts, strict=True))


async def written(engine: Any, answers: Sequence[Completion], folder: Path, num: int) -> dict[str, int]:
    """Claim the states of answers as files of a folder; return what became of all once so many are written."""
    lengths = {one.request_id: len(one.prompt_ids + one.token_ids) for one in answers}
    await engine.settle_states([Claim(name, str(folder / name), length, "t") for name, length in lengths.items()])
    while (counts := await engine.settle_states([])).get("written", 0) < num:
        await asyncio.sleep(0.01)
    return dict(counts)


def require_the_targets(
    answers: Sequence[Completion], target: Path, folder: Path, layers: Sequence[int], width: int
) -> set[int]:
    """Fail where written states are not what the target computes; return the positions that they begin at."""
    states, firsts = HiddenStates(folder / "hidden", samples_of(answers), layers, width), set()
    states.extract(target)
    for sample in samples_of(answers):
        found = read(folder / sample.id, "t", layers, sample.token_ids)
        wanted = states.read(sample)[0][found.first : -1].float()
        assert float((found.states.float() - wanted).norm(dim=1).div(wanted.norm(dim=1)).max()) < 0.03
        firsts.add(found.first)
    return firsts
