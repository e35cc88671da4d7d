"""Two tiny models, as running engines, and answers that they write in turn."""

import asyncio
from pathlib import Path

from transformers import AutoTokenizer

from models import catalog
from models.engines import Sampling
from models.engines.torch import Params as EngineParams
from models.engines.torch import TorchEngine
from models.params import BaseParams
from models.reasoning import Step, Vocabulary, Writers
from models.targets import random, stop_ids

MAX_MODEL_LEN = 512
MAX_TOKENS = 60
PROMPT = [5, 40, 77, 30, 101, 9]
GREEDY = Sampling(temperature=0.0)
# Of the tiny models' bytes every seventh ends a step: blank lines are rare where text means nothing.
STEP_ENDS = tuple(range(3, 259, 7))


def make_small(directory: Path) -> Path:
    """Make a model of one layer that says other things than the target of these tests."""
    random.build(random.Params(num_layers=1, seed=7), directory)
    return directory


def think(
    small: Path,
    target: Path,
    params: BaseParams,
    max_tokens: int = MAX_TOKENS,
    max_model_len: int = MAX_MODEL_LEN,
    sampling: Sampling = GREEDY,
    prompt: list[int] = PROMPT,
) -> list[Step]:
    """Return the steps of an answer."""

    async def inside() -> list[Step]:
        own = EngineParams(dtype="float32", max_model_len=MAX_MODEL_LEN, num_draft_tokens=0)
        engines = [await TorchEngine.start(one, None, own) for one in (small, target)]
        words = vocabulary(target)
        writers = Writers(engines[0], engines[1], words, max_model_len, sampling, "one")
        method = catalog.load("reasoning", params.name)
        return [step async for step in method.think(writers, prompt, max_tokens, params)]

    return asyncio.run(inside())


def vocabulary(target: Path) -> Vocabulary:
    """Return what tiny models write in, with steps that end more often."""
    words = Vocabulary(AutoTokenizer.from_pretrained(target), stop_ids(target))
    words.step_ends = STEP_ENDS
    return words


def alone(model: Path, sampling: Sampling = GREEDY, max_tokens: int = MAX_TOKENS) -> tuple[int, ...]:
    """Return what one model answers by itself."""

    async def inside() -> tuple[int, ...]:
        own = EngineParams(dtype="float32", max_model_len=MAX_MODEL_LEN, num_draft_tokens=0)
        engine = await TorchEngine.start(model, None, own)
        wanted = sampling.model_copy(update={"max_tokens": max_tokens})
        return (await engine.generate(PROMPT, wanted, "alone")).token_ids

    return asyncio.run(inside())


def written(steps: list[Step]) -> tuple[int, ...]:
    """Return the tokens of an answer."""
    return tuple(token for step in steps for token in step.token_ids)
