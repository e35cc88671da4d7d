"""Answers of an engine, and what they are held to: those without a draft, scores, and the target's hidden states."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from models.drafts import Draft
from models.engines import Completion, Engine, Sampling
from models.engines.vllm import Params
from models.engines.vllm.capture import Claim
from models.engines.vllm.engine import VllmEngine
from models.evaluation import scoring
from models.evaluation.golden import Golden, equal_output
from models.learning.captured import read
from models.learning.hidden import HiddenStates, Sample


async def answer_all(
    engine: Engine, asked: Sequence[list[int]], sampling: Sampling, concurrency: int, tag: str
) -> list[Completion]:
    """Ask prompts, so many at once."""
    gate = asyncio.Semaphore(concurrency)

    async def answer(number: int, prompt: list[int]) -> Completion:
        async with gate:
            return await engine.generate(prompt, sampling, f"{tag}-{number}")

    return list(await asyncio.gather(*(answer(number, prompt) for number, prompt in enumerate(asked))))


async def answers_of(
    target: Path, draft: Path | None, params: Params, asked: Sequence[list[int]], sampling: Sampling
) -> list[Completion]:
    """Start an engine, ask it one prompt after the other, and end it."""
    engine = await VllmEngine.start(target, draft, params)
    try:
        return await answer_all(engine, asked, sampling, 1, "alone")
    finally:
        await engine.close()


def golden_of(answers: Sequence[Completion]) -> list[Golden]:
    return [Golden(prompt_ids=one.prompt_ids, token_ids=one.token_ids, gaps=one.gaps) for one in answers]


def require_none_different(
    golden: Sequence[Golden], answers: Sequence[Completion], threshold: float, least_equal: float = 0.0
) -> None:
    """Fail where an answer parts from what it is held to otherwise than at a near tie, or too many do at one."""
    verdicts = Counter(equal_output(g, one.token_ids, threshold) for g, one in zip(golden, answers, strict=True))
    assert verdicts["different"] == 0 and verdicts["equal"] >= least_equal * len(golden), verdicts


def samples_of(answers: Sequence[Completion]) -> list[Sample]:
    return [Sample(one.request_id, "chat", list(one.prompt_ids), list(one.token_ids)) for one in answers]


def num_scored_alike(draft: Draft, target: Path, answers: Sequence[Completion], folder: Path) -> int:
    """Count the answers of which scoring without an engine, at K = 3, counts the steps and accepted tokens of one."""
    scores = scoring.score(draft, target, samples_of(answers), 3, folder)
    counts = [(len(one.drafted), sum(one.accepted)) for one in answers]
    return sum((one.steps, one.accepted) == count for one, count in zip(scores, counts, strict=True))


async def captured(engine: VllmEngine, done: Sequence[Completion], folder: Path, num_written: int) -> dict[str, int]:
    """Claim the states of answers, and return what became of them once so many are in the folder."""
    claims = [Claim(c.request_id, str(folder / c.request_id), len(c.prompt_ids + c.token_ids), "t") for c in done]
    await engine.settle_states(claims)
    while (counts := await engine.settle_states([])).get("written", 0) < num_written:
        await asyncio.sleep(0.01)
    return counts


def require_states(target: Path, answers: Sequence[Completion], layers: Sequence[int], folder: Path) -> set[int]:
    """Fail where captured states are others than the target computes; return the positions that they begin at."""
    samples, firsts = samples_of(answers), set()
    states = HiddenStates(folder / "hidden", samples, tuple(layers), 128)
    states.extract(target)
    for sample in samples:
        found = read(folder / sample.id, "t", tuple(layers), sample.token_ids)
        firsts.add(found.first)
        wanted = states.read(sample)[0][found.first : -1].float()
        assert float((found.states.float() - wanted).norm(dim=1).div(wanted.norm(dim=1)).max()) < 0.03
    return firsts
