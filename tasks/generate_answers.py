"""Let the target answer, in its production engine and without a draft."""

import asyncio
import gc
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from transformers import AutoTokenizer

from infra.artifacts import Artifact, open_artifact
from infra.machine import openmp_preload
from infra.settings import load_settings
from models import catalog
from models.chats import ChatEncoder
from models.core.evaluation.golden import Golden, near_tie_threshold, save_golden
from models.core.learning.hidden import Sample
from models.engines import Completion, Engine, Sampling
from models.params import BaseParams
from models.recipe import Generate, Recipe
from models.sources import Prompt, encoded
from tasks.prepare_text import in_turn
from tasks.select_data import read_prompts
from tasks.stages import cached_step, progress, task
from tasks.stages.samples import SPLITS, append_samples, by_domain, read_written, write_samples

ANSWERS = "answers.jsonl"


@task
def generate_answers(recipe: Recipe, target: Artifact, prompts: Artifact) -> Artifact:
    """Answer the training and held-out prompts of the first draft's domains; an artifact of kind "samples".

    Each answer is written as it comes, so a killed run asks only for the rest. The target's reference outputs
    (`models.core.evaluation.golden`) are recorded beside the answers, because starting the engine costs more than they
    do.
    """

    def make(directory: Path, work: Path) -> None:
        folder, max_len = open_artifact(prompts), recipe.engine.max_model_len
        encoder = ChatEncoder.of(AutoTokenizer.from_pretrained(open_artifact(target)))
        parts = {part: [one for one, _ in encoded(read_prompts(folder, part), encoder, max_len)] for part in SPLITS}
        golden_prompts = in_turn(by_domain(parts["held_out"]))[: recipe.generate.num_golden]
        asked = {part: [prompt for prompt in parts[part] if prompt.domain in recipe.first_domains] for part in parts}
        wanted = [prompt for part in asked.values() for prompt in part]

        async def answer() -> dict[str, Sample]:
            async with open_engine(open_artifact(target), recipe.engine, load_settings().costs) as engine:
                golden, threshold = await _reference(engine, encoder, golden_prompts, recipe.generate)
                save_golden(directory, golden, threshold)
                return await answer_prompts(engine, encoder, wanted, recipe.generate, work / ANSWERS)

        answers = asyncio.run(answer())
        gc.collect()  # the engine is in reference cycles, and complains if it is still there when Python ends
        for part, of_part in asked.items():
            write_samples(directory, part, (_named(answers[one.id], one, recipe) for one in of_part))

    params = {
        "generate": recipe.generate.model_dump(exclude={"concurrency"}),
        "engine": recipe.engine.model_dump(mode="json"),
        "domains": {domain: recipe.traffic[domain].send_groups for domain in recipe.first_domains},
    }
    inputs, code = {"target": target, "prompts": prompts}, (save_golden, in_turn)
    return cached_step("samples", "samples", params, make, inputs, code)


def _named(answer: Sample, prompt: Prompt, recipe: Recipe) -> Sample:
    """Return an answer under its domain's name and, where requests name their groups, with its own."""
    group = prompt.group if recipe.traffic[prompt.domain].send_groups else ""
    return answer._replace(domain=prompt.domain, cluster=group)


@asynccontextmanager
async def open_engine(target_dir: Path, params: BaseParams, costs: Path | None = None) -> AsyncIterator[Engine]:
    """Start an engine without a draft, and close it at the end; what its steps take is kept in folder `costs`."""
    engine = await _start(target_dir, params, costs)
    try:
        yield engine
    finally:
        await engine.close()


async def _start(target_dir: Path, params: BaseParams, costs: Path | None) -> Engine:
    # vLLM keeps a traceback with this frame in it, which must not hold the engine.
    module = catalog.load("engines", params.name)
    # The engine's own processes inherit these when they start.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.update({**module.child_environment(params), **openmp_preload()})
    engine: Engine = await module.start(target_dir, None, params, costs=costs)
    return engine


async def answer_prompts(
    engine: Engine, encoder: ChatEncoder, prompts: Sequence[Prompt], generate: Generate, file: Path
) -> dict[str, Sample]:
    """Return prompt id to answer; those in `file` are not asked for again, the others are added to it."""
    answered = {sample.id: sample for sample in read_written(file)}
    sampling = Sampling(max_tokens=generate.max_tokens)
    slots = asyncio.Semaphore(generate.concurrency)
    with progress("answer prompts") as show:

        async def answer(prompt: Prompt) -> None:
            async with slots:
                completion = await engine.generate(prompt.encode(encoder), sampling, prompt.id)
            sample = Sample(prompt.id, prompt.domain, list(completion.prompt_ids), list(completion.token_ids))
            answered[prompt.id] = sample
            append_samples(file, [sample])
            show(len(answered), len(prompts))

        await asyncio.gather(*(answer(prompt) for prompt in prompts if prompt.id not in answered))
    return answered


async def _reference(
    engine: Engine, encoder: ChatEncoder, prompts: Sequence[Prompt], generate: Generate
) -> tuple[list[Golden], float]:
    """Ask one prompt at a time, which is the reference, then several, which fixes what a near-tie is."""
    asked_once = {prompt.id: prompt.encode(encoder) for prompt in prompts}
    backwards = dict(reversed(asked_once.items()))
    ways = {"one": (asked_once, 1), "two": (asked_once, 2), "all": (asked_once, len(prompts))}
    ways["all backwards"] = (backwards, len(prompts))
    passes = list[dict[str, Completion]]()
    with progress("record reference outputs") as show:
        for name, (asked, most) in ways.items():
            passes.append(await _joining(engine, asked, most, generate.max_tokens, f"golden-{name}"))
            show(len(passes), len(ways), f"{name} at a time")
    reference, *reruns = [[answers[prompt_id] for prompt_id in asked_once] for answers in passes]
    golden = [Golden(prompt_ids=one.prompt_ids, token_ids=one.token_ids, gaps=one.gaps) for one in reference]
    return golden, near_tie_threshold(golden, reruns)


async def _joining(
    engine: Engine, prompts: Mapping[str, list[int]], most: int, max_tokens: int, name: str
) -> dict[str, Completion]:
    """Return id to answer; a prompt is asked when the one before has its first token and fewer than `most` are asked.

    As in a service, most steps then read a prompt or none while others go on, which changes what they are computed by.
    """
    sampling, slots = Sampling(max_tokens=max_tokens, num_logprobs=2), asyncio.Semaphore(most)

    async def answer(prompt_id: str, begun: asyncio.Event) -> Completion:
        try:
            return await engine.generate(prompts[prompt_id], sampling, f"{name}-{prompt_id}", begun.set)
        finally:
            begun.set()  # where it failed too
            slots.release()

    tasks = {}
    for prompt_id in prompts:
        await slots.acquire()
        begun = asyncio.Event()
        tasks[prompt_id] = asyncio.create_task(answer(prompt_id, begun))
        await begun.wait()
    return dict(zip(tasks, await asyncio.gather(*tasks.values()), strict=True))
