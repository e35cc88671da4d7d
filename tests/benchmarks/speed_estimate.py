"""Whether the speed that `redraft status` tells of a domain is that of drafting on and off, asked in turn.

    python -m tests.benchmarks.speed_estimate TARGET DRAFT --data FOLDER

FOLDER holds `gsm8k.jsonl`, `mbpp.jsonl` and `wikisql.jsonl`, chats a line. For each number of streams one compiled
engine starts with an empty table of what steps take; it remembers no answers, since the same prompts come again. Each
domain's prompts are first asked as a service asks them, twice, and the estimate is read then: no plain request has run
by that time but the engine's own measurement. Then the same prompts are asked with drafting and without it in turn, a
few at a time, since a shared machine changes its speed within seconds; the order flips each time, and each time begins
with an empty prefix cache. On ÷ off is the ratio of tokens a second of one request, its prompt's reading included, with
a 95% interval over turns and requests. Prints a line for each number of streams and domain, and one JSON line.
"""

import argparse
import asyncio
import json
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm
from transformers import AutoTokenizer
from vllm import SamplingParams

from infra.machine import describe_machine, openmp_preload
from models.chats import ChatEncoder
from models.core.evaluation.latency import Decoded, compare_blocks
from models.engines import Completion, LookUp
from models.engines import vllm as served
from models.engines.vllm.engine import VllmEngine
from models.engines.vllm.fields import DraftOptions
from models.engines.vllm.measuring import measure as measure_steps

DOMAINS = ("gsm8k", "mbpp", "wikisql")
ALLOWED = {1: 0.05, 4: 0.08}  # streams to how far the estimate may be off
TURN = 2  # requests of each stream that are asked on or off at once


def prompts_of(data: Path, target: Path, count: int) -> dict[str, list[list[int]]]:
    """Return the first `count` prompts of each domain, as ids."""
    tokenizer = AutoTokenizer.from_pretrained(target)
    found = {}
    for domain in DOMAINS:
        lines = (data / f"{domain}.jsonl").read_text().splitlines()[:count]
        found[domain] = [ChatEncoder.of(tokenizer).encode(json.loads(line)["messages"]) for line in lines]
    return found


async def ask(
    engine: VllmEngine, prompts: Sequence[list[int]], draft_options: DraftOptions, streams: int, num_tokens: int
) -> dict[str, Decoded]:
    """Ask all prompts; return what each answer took, first token included, by its place."""
    gate = asyncio.Semaphore(streams)

    async def one(place: int, prompt: list[int]) -> Completion:
        async with gate:
            sampling = SamplingParams(max_tokens=num_tokens, temperature=0)
            name = f"{draft_options.drafting}-{time.monotonic()}-{place}"
            async for output in engine.llm.generate({"prompt_token_ids": prompt}, sampling, name, draft_options):
                last: Any = output
            completion: Completion = last.completion
            return completion

    answers = await asyncio.gather(*(one(place, prompt) for place, prompt in enumerate(prompts)))
    return {
        str(place): Decoded(
            len(answer.token_ids), (answer.first_token_ms + answer.per_token_ms * (len(answer.token_ids) - 1)) / 1000
        )
        for place, answer in enumerate(answers)
    }


async def measure(given: argparse.Namespace, streams: int) -> list[dict[str, Any]]:
    """Return a row for each domain."""
    rows, prompts = [], prompts_of(given.data, given.target, given.prompts)
    with tempfile.TemporaryDirectory() as costs:
        lookup = LookUp(num_tokens=0) if given.head_only else LookUp(remembered=0)
        params = served.Params(enforce_eager=given.eager, max_num_seqs=16, lookup=lookup)
        engine = await VllmEngine.start(given.target, given.draft, params, draft_version="1", costs=Path(costs))
        try:
            await measure_steps(engine)
            for domain, of_domain in prompts.items():
                on, off = DraftOptions("auto", domain), DraftOptions("off", domain)
                for _ in range(2):
                    await engine.llm.reset_prefix_cache()
                    await ask(engine, of_domain, on, streams, given.tokens)
                told, throughput = engine.llm.speeds[domain], engine.llm.throughput
                blocks = []
                size = TURN * streams
                turns = [of_domain[start : start + size] for start in range(0, len(of_domain), size)] * given.rounds
                for number, asked in enumerate(tqdm(turns, f"{streams} streams, {domain}", mininterval=5)):
                    pair = {}
                    for draft_options in (on, off) if number % 2 == 0 else (off, on):
                        await engine.llm.reset_prefix_cache()
                        pair[draft_options.drafting] = await ask(engine, asked, draft_options, streams, given.tokens)
                    blocks.append((pair["auto"], pair["off"]))
                ratio = compare_blocks(blocks)
                row = {
                    "streams": streams,
                    "domain": domain,
                    "told": round(told.tokens_per_s / told.plain_tokens_per_s, 3),
                    "told_after": round(
                        engine.llm.speeds[domain].tokens_per_s / engine.llm.speeds[domain].plain_tokens_per_s, 3
                    ),
                    "speed": {name: round(value, 3) for name, value in told},
                    "on_off": [round(one, 3) for one in (ratio.value, ratio.low, ratio.high)],
                    "plan": None if throughput is None else [throughput.num_draft_tokens, throughput.why],
                }
                row["error"] = round(row["told"] / ratio.value - 1, 3)
                rows.append(row)
                tqdm.write(json.dumps(row))
        finally:
            await engine.close()
    return rows


def main() -> None:
    """Measure, in a process that has the engine's environment from its start."""
    parser = argparse.ArgumentParser(description="Hold the speed that is told against on and off, asked in turn.")
    parser.add_argument("target", type=Path, help="a directory")
    parser.add_argument("draft", type=Path, help="a directory")
    parser.add_argument("--data", type=Path, required=True, help="folder of the prompts")
    parser.add_argument("--prompts", type=int, default=40, help="of each domain")
    parser.add_argument("--tokens", type=int, default=64, help="of an answer, at most")
    parser.add_argument("--streams", type=int, nargs="+", default=[*ALLOWED])
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--head-only", action="store_true", help="look nothing up")
    parser.add_argument("--eager", action="store_true", help="don't compile: a quick try")
    given = parser.parse_args()
    os.environ.update(served.child_environment(served.Params()) | openmp_preload())
    rows = [row for streams in given.streams for row in asyncio.run(measure(given, streams))]
    print(json.dumps({**describe_machine(), "rows": rows}))


if __name__ == "__main__":
    main()
