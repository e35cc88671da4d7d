"""The reference engine against vLLM compiled, without speculation, at one stream, in turns in one process.

    python -m tests.benchmarks.reference_speed TARGET

Prints tokens/s after the first token, round by round, and says nothing of outputs: tests hold those together.
"""

import argparse
import asyncio
import os
from collections.abc import Sequence
from pathlib import Path

from transformers import AutoTokenizer

from models.engines import Engine, Sampling
from models.engines import torch as reference
from models.engines import vllm as served

PROMPTS = (
    "Write a Python function that parses an ISO date and returns",
    "The history of the Roman empire begins",
    "def quicksort(items):\n    if len(items)",
    "Explain to a child why the sky is blue and why sunsets are red.",
)
NUM_ROUNDS = 6
COMPILED = served.Params(num_draft_tokens=0, enforce_eager=False, extra={"enable_prefix_caching": False})


async def speed(engine: Engine, prompts: Sequence[list[int]], name: str) -> float:
    """Return tokens/s after the first token, over all prompts."""
    sampling = Sampling(max_tokens=64, ignore_eos=True)
    answers = [await engine.generate(prompt, sampling, f"{name}-{number}") for number, prompt in enumerate(prompts)]
    counts = [len(answer.token_ids) - 1 for answer in answers]
    milliseconds = sum(answer.per_token_ms * count for answer, count in zip(answers, counts, strict=True))
    return 1000 * sum(counts) / milliseconds


async def compare(target: Path) -> None:
    """Print both speeds, round by round."""
    tokenizer = AutoTokenizer.from_pretrained(target)
    prompts = [tokenizer(prompt).input_ids for prompt in PROMPTS]
    engines: dict[str, Engine] = {
        "vLLM, compiled": await served.start(target, None, COMPILED),
        "reference": await reference.start(target, None, reference.Params(num_draft_tokens=0)),
    }
    for name, engine in engines.items():
        await speed(engine, prompts[:1], f"warm {name}")
    for number in range(NUM_ROUNDS):
        names = list(engines) if number % 2 == 0 else list(engines)[::-1]
        speeds = {name: await speed(engines[name], prompts, f"{number} {name}") for name in names}
        ratio = speeds["reference"] / speeds["vLLM, compiled"]
        print(number + 1, {name: round(value, 1) for name, value in speeds.items()}, f"ratio {ratio:.2f}", flush=True)
    for engine in engines.values():
        await engine.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Compare the reference engine with vLLM compiled.")
    parser.add_argument("target", type=Path, help="directory of a Llama-like model")
    directory = parser.parse_args().target
    os.environ.update(served.child_environment(COMPILED))
    asyncio.run(compare(directory))
