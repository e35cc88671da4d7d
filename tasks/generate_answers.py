"""Let the target answer, in its production engine and without a draft."""

import asyncio
import itertools
import json
import os
import shutil
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE
from transformers import AutoTokenizer

from infra.artifacts import Artifact, open_artifact
from infra.doctor import openmp_preload
from models.engines.vllm import Completion, Sampling, child_environment
from models.golden import Golden, near_tie_threshold, save_golden
from models.hidden import Sample
from models.params import BaseParams
from models.sources import Prompt
from models.tokens import encode_chat
from tasks.recipe import Recipe
from tasks.reporting import progress
from tasks.samples import write_samples
from tasks.select_data import read_prompts
from tasks.stages import produce

ANSWERS = "answers.jsonl"


@task(cache_policy=NO_CACHE)
def generate_answers(recipe: Recipe, target: Artifact, prompts: Artifact) -> Artifact:
    """Answer the training and held-out prompts of the first draft's domains; an artifact of kind "samples".

    Each answer is written as it comes, so a killed run asks only for the rest.
    """

    def make(directory: Path, work: Path) -> None:
        target_dir, folder = open_artifact(target), open_artifact(prompts)
        parts = {
            part: [prompt for prompt in read_prompts(folder, part) if prompt.domain in recipe.first_domains]
            for part in ("train", "held_out")
        }
        wanted = [prompt for part in parts.values() for prompt in part]
        asyncio.run(_answer_rest(recipe, target_dir, wanted, work / ANSWERS))
        answers = _read_answers(work / ANSWERS)
        for part, asked in parts.items():
            write_samples(directory, part, (answers[prompt.id]._replace(domain=prompt.domain) for prompt in asked))

    return produce(
        stage="samples",
        kind="samples",
        params={
            "max_tokens": recipe.generate.max_tokens,
            "engine": recipe.engine.model_dump(mode="json"),
            "domains": recipe.first_domains,
        },
        inputs={"target": target, "prompts": prompts},
        code=(__name__, f"models.engines.{recipe.engine.name}"),
        make=make,
    )


@task(cache_policy=NO_CACHE)
def record_golden(recipe: Recipe, target: Artifact, prompts: Artifact) -> Artifact:
    """Add reference outputs to a target's files; an artifact of kind "target".

    The prompts are asked one at a time, which is the reference, then two at a time and all at once, which fixes what
    counts as a near-tie.
    """

    def make(directory: Path, _: Path) -> None:
        target_dir = open_artifact(target)
        chosen = _across_domains(read_prompts(open_artifact(prompts), "held_out"), recipe.generate.num_golden)
        golden, threshold = asyncio.run(_reference(recipe, target_dir, chosen))
        shutil.copytree(target_dir, directory, dirs_exist_ok=True)
        save_golden(directory, golden, threshold)

    return produce(
        stage="golden",
        kind="target",
        params={
            "max_tokens": recipe.generate.max_tokens,
            "num_golden": recipe.generate.num_golden,
            "engine": recipe.engine.model_dump(mode="json"),
        },
        inputs={"target": target, "prompts": prompts},
        code=(__name__, f"models.engines.{recipe.engine.name}", "models.golden"),
        make=make,
    )


@asynccontextmanager
async def _engine(target_dir: Path, params: BaseParams) -> AsyncIterator[Any]:
    # The engine's own processes inherit these when they start.
    os.environ.update({**child_environment(params), **openmp_preload()})
    from models.engines.vllm import VllmEngine  # vLLM takes seconds to import

    engine = await VllmEngine.start(target_dir, None, params)
    try:
        yield engine
    finally:
        await engine.close()


async def _answer_rest(recipe: Recipe, target_dir: Path, prompts: Sequence[Prompt], file: Path) -> None:
    answered = _read_answers(file)
    rest = [prompt for prompt in prompts if prompt.id not in answered]
    if not rest:
        return
    tokenizer = AutoTokenizer.from_pretrained(target_dir)
    sampling = Sampling(max_tokens=recipe.generate.max_tokens)
    slots = asyncio.Semaphore(recipe.generate.concurrency)
    with progress("answer prompts") as show, file.open("a", encoding="utf-8") as lines:
        async with _engine(target_dir, recipe.engine) as engine:

            async def answer(prompt: Prompt) -> None:
                async with slots:
                    completion = await engine.generate(_encode(tokenizer, prompt), sampling, prompt.id)
                sample = Sample(prompt.id, prompt.domain, list(completion.prompt_ids), list(completion.token_ids))
                answered[prompt.id] = sample
                lines.write(json.dumps(sample._asdict()) + "\n")
                lines.flush()
                show(len(answered), len(prompts))

            await asyncio.gather(*(answer(prompt) for prompt in rest))


def _read_answers(file: Path) -> dict[str, Sample]:
    """Return prompt id to answer, and cut off a last line that a kill left half-written."""
    if not file.is_file():
        return {}
    whole, _, rest = file.read_bytes().rpartition(b"\n")
    if rest:
        os.truncate(file, len(whole) + bool(whole))
    samples = [Sample(**json.loads(line)) for line in whole.splitlines()]
    return {sample.id: sample for sample in samples}


async def _reference(recipe: Recipe, target_dir: Path, prompts: Sequence[Prompt]) -> tuple[list[Golden], float]:
    tokenizer = AutoTokenizer.from_pretrained(target_dir)
    sampling = Sampling(max_tokens=recipe.generate.max_tokens, num_logprobs=2)
    with progress("record reference outputs") as show:
        async with _engine(target_dir, recipe.engine) as engine:
            passes: list[list[Completion]] = []
            for size in sorted({1, 2, len(prompts)}):
                completions: list[Completion] = []
                for start in range(0, len(prompts), size):
                    batch = [
                        engine.generate(_encode(tokenizer, prompt), sampling, f"golden-{size}-{prompt.id}")
                        for prompt in prompts[start : start + size]
                    ]
                    completions += await asyncio.gather(*batch)
                    show(len(completions), len(prompts), f"{size} at a time")
                passes.append(completions)
    reference, *reruns = passes
    golden = [Golden(prompt_ids=one.prompt_ids, token_ids=one.token_ids, gaps=one.gaps) for one in reference]
    return golden, near_tie_threshold(golden, [[one.token_ids for one in rerun] for rerun in reruns])


def _across_domains(prompts: Sequence[Prompt], count: int) -> list[Prompt]:
    """Return the first `count` prompts, the domains in turn."""
    by_domain: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        by_domain.setdefault(prompt.domain, []).append(prompt)
    turns = itertools.chain.from_iterable(itertools.zip_longest(*by_domain.values()))
    return [prompt for prompt in turns if prompt is not None][:count]


def _encode(tokenizer: Any, prompt: Prompt) -> list[int]:
    return encode_chat(tokenizer, [message.model_dump() for message in prompt.messages])
