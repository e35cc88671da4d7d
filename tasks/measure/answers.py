"""The target's own answers to prompts that nobody serves, kept in a cell."""

import asyncio
import gc
from collections.abc import Sequence

from transformers import AutoTokenizer

from infra.artifacts import Artifact, open_artifact
from models.chats import ChatEncoder
from models.core.learning.hidden import Sample
from models.sources import Prompt
from tasks.generate_answers import ANSWERS, answer_prompts, open_engine
from tasks.measure.run import Run


def answers(
    run: Run, target: Artifact, prompts: Sequence[Prompt], cell: str, max_tokens: int | None = None
) -> list[Sample]:
    """Let the target answer: as many samples, in the same order; an interrupted run asks only for the rest."""

    generate = run.recipe.generate.model_copy(update={} if max_tokens is None else {"max_tokens": max_tokens})

    async def answer() -> dict[str, Sample]:
        directory = open_artifact(target)
        async with open_engine(directory, run.recipe.engine) as engine:
            encoder = ChatEncoder.of(AutoTokenizer.from_pretrained(directory))
            return await answer_prompts(engine, encoder, prompts, generate, run.folder / ANSWERS)

    def ask() -> list[dict[str, object]]:
        found = asyncio.run(answer())
        gc.collect()  # the engine is in reference cycles, and complains if it is still there when Python ends
        return [found[prompt.id]._replace(domain=prompt.domain)._asdict() for prompt in prompts]

    return [Sample(**row) for row in run.cells.keep(cell, ask)]
