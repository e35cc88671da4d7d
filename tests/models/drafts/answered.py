"""Answers of the reference engine that drafts in some way, for tests of what one draft proposes."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from models.core.evaluation.scoring import score
from models.core.layers.decoder import Decoder
from models.core.learning.hidden import Sample
from models.drafts import Draft
from models.engines import Completion, Sampling
from models.engines.torch import Params, TorchEngine

GREEDY = Sampling(max_tokens=24, ignore_eos=True, num_logprobs=2)


def prompts(count: int) -> list[list[int]]:
    """Return seeded prompts of 8 to 16 tokens."""
    rng = np.random.default_rng(0)
    return [rng.integers(3, 67, size=8 + number % 9).tolist() for number in range(count)]


def repeated(times: int) -> list[list[int]]:
    """Return one prompt several times."""
    return prompts(1) * times


def answers_of(target: Path, asked: list[list[int]]) -> list[Sample]:
    """Return the target's own answers."""
    found = enumerate(answer_all(target, None, asked))
    return [Sample(f"{number:02d}", "d", [*one.prompt_ids], [*one.token_ids]) for number, one in found]


def tau_of(draft: Draft, target: Path, samples: list[Sample], num_draft_tokens: int, work: Path) -> float:
    """Return how many tokens a step of the target says on such answers."""
    scores = score(draft, target, samples, num_draft_tokens, work)
    return 1 + sum(one.accepted for one in scores) / sum(one.steps for one in scores)


def answer_all(
    target: Path, draft: Draft | None, asked: list[list[int]], sampling: Sampling = GREEDY, **changes: object
) -> list[Completion]:
    """Answer prompts one after the other in one engine, in float32."""
    return answer_each(target, draft, asked, [sampling] * len(asked), **changes)


def answer_each(
    target: Path,
    draft: Draft | None,
    asked: list[list[int]],
    samplings: Sequence[Sampling],
    device: str = "cpu",
    **changes: object,
) -> list[Completion]:
    """Answer prompts one after the other in one engine, in float32, each in its own way."""
    moved = None if draft is None else draft.to(device)

    async def inside() -> list[Completion]:
        engine = TorchEngine(Decoder.load(target, torch.float32, device), target, moved, None, Params(**changes))
        each = enumerate(zip(asked, samplings, strict=True))
        return [await engine.generate(prompt, sampling, str(number)) for number, (prompt, sampling) in each]

    return asyncio.run(inside())


def require_equal(answers: Sequence[Completion], plain: Sequence[Completion]) -> None:
    """Fail where answers differ otherwise than at a near tie."""
    for one, other in zip(answers, plain, strict=True):
        assert one.token_ids == other.token_ids or min(one.gaps) < 1e-3
        assert one.finish_reason == other.finish_reason
