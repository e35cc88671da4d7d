"""Answers of an engine, and what they are held to: those without a draft, and scores."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from models.core.evaluation import scoring
from models.core.evaluation.golden import Golden, equal_output
from models.core.learning.hidden import Sample
from models.drafts import Draft
from models.engines import Completion, Engine, Sampling


async def answer_all(
    engine: Engine, asked: Sequence[list[int]], sampling: Sampling, concurrency: int, tag: str
) -> list[Completion]:
    """Ask prompts, so many at once."""
    gate = asyncio.Semaphore(concurrency)

    async def answer(number: int, prompt: list[int]) -> Completion:
        async with gate:
            return await engine.generate(prompt, sampling, f"{tag}-{number}")

    return list(await asyncio.gather(*(answer(number, prompt) for number, prompt in enumerate(asked))))


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
