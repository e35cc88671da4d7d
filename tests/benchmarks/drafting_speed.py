"""Ways of drafting in one compiled engine, in turns: none, the head alone at K, and by plan with look-up.

    python -m tests.benchmarks.drafting_speed TARGET DRAFT

Asks the held-out prompts of recipe `smollm2-cpu`, greedy, in process: no endpoint, no other text of a key is looked up.
"none" switches speculation off. The ways take turns in an order that flips from round to round, each with an empty
prefix cache. Outputs are judged by those of a run without a draft, at the threshold that the target was registered
with; that run alone asks for logprobs, which take a speculating engine several ms a step. Prints a line for each way,
domain and number of streams, then the ratios to "none" with intervals over rounds and requests, and one JSON line.
"""

import argparse
import asyncio
import json
import os
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from infra.machine import openmp_preload
from models.chats import ChatEncoder
from models.core.evaluation.golden import Golden, equal_output, load_golden
from models.core.evaluation.latency import Decoded, compare_blocks
from models.engines import Completion, Sampling, Way
from models.engines import vllm as served
from models.engines.vllm.engine import VllmEngine
from models.engines.vllm.measuring import measure as measure_steps
from models.recipe import load_recipe
from tasks.select_data import choose_prompts

NONE = "none"
WAYS: tuple[str, ...] = (NONE, "head", "auto")
NUM_TOKENS = 100


def held_out(target: Path, count: int) -> dict[str, list[list[int]]]:
    """Return `count` prompts of each domain that no draft of the recipe learns from."""
    tokenizer, recipe = AutoTokenizer.from_pretrained(target), load_recipe("smollm2-cpu")
    return {
        domain: [
            prompt.encode(ChatEncoder.of(tokenizer))
            for prompt in choose_prompts(domain, traffic, recipe.seed)["held_out"][:count]
        ]
        for domain, traffic in recipe.traffic.items()
    }


async def ask(
    engine: VllmEngine, prompts: Sequence[list[int]], way: Way, streams: int, num_logprobs: int | None = None
) -> tuple[list[Completion], float]:
    """Return the answers, and tokens/s of all streams together."""
    sampling = Sampling(max_tokens=NUM_TOKENS, num_logprobs=num_logprobs, drafting=way)
    gate = asyncio.Semaphore(streams)

    async def one(number: int, prompt: list[int]) -> Completion:
        async with gate:
            return await engine.generate(prompt, sampling, f"{time.monotonic()}-{number}")

    started_s = time.monotonic()
    answers = list(await asyncio.gather(*(one(number, prompt) for number, prompt in enumerate(prompts))))
    return answers, sum(len(answer.token_ids) for answer in answers) / (time.monotonic() - started_s)


def figures(answers: Sequence[Completion], plain: Sequence[Completion], threshold: float) -> dict[str, Any]:
    """Return what was accepted, from where, and how the outputs compare with those without a draft."""
    golden = [Golden(prompt_ids=one.prompt_ids, token_ids=one.token_ids, gaps=one.gaps) for one in plain]
    verdicts = Counter(equal_output(g, one.token_ids, threshold) for g, one in zip(golden, answers, strict=True))
    steps = [step for one in answers for step in zip(one.matches, one.drafted, one.accepted, strict=True)]
    looked_up = [accepted for match, _, accepted in steps if match > 0]
    return {
        "tau": round(1 + sum(accepted for *_, accepted in steps) / max(len(steps), 1), 3),
        "share_looked_up": round(len(looked_up) / max(len(steps), 1), 3),
        "accepted_looked_up": round(sum(looked_up) / max(len(looked_up), 1), 2),
        "outputs": dict(verdicts),
    }


def timed(answers: Sequence[Completion]) -> dict[str, Decoded]:
    """Return what each answer took, first token included, by its place."""
    return {
        str(place): Decoded(
            len(one.token_ids), (one.first_token_ms + one.per_token_ms * (len(one.token_ids) - 1)) / 1000
        )
        for place, one in enumerate(answers)
    }


async def measure(
    target: Path, draft: Path, count: int, streams: Sequence[int], rounds: int, ways: Sequence[str]
) -> list[dict[str, Any]]:
    """Return a row for each way, domain, number of streams and round."""
    _, threshold = load_golden(target)
    params = served.Params(enforce_eager=False, max_num_seqs=64, lookup=served.LookUp(remembered=0))
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as costs:
        started_s = time.monotonic()
        engine = await VllmEngine.start(target, draft, params, draft_version="1", costs=Path(costs))
        print(f"started in {time.monotonic() - started_s:.1f} s", flush=True)
        try:
            started_s = time.monotonic()
            await measure_steps(engine)
            print(f"measured what steps take in {time.monotonic() - started_s:.1f} s", flush=True)
            prompts = held_out(target, count)
            for of_domain in prompts.values():  # warms up, and lets the policy see what is accepted
                await ask(engine, of_domain[: count // 2], "auto", 1)
            await engine.set_speculation(False)
            plain = {
                domain: (await ask(engine, of, "auto", count, num_logprobs=2))[0] for domain, of in prompts.items()
            }
            blocks: dict[tuple[int, str, str], list[dict[str, Decoded]]] = defaultdict(list)
            for number in range(rounds):
                for num_streams in streams:
                    for domain, of_domain in prompts.items():
                        for way in ways if number % 2 == 0 else ways[::-1]:
                            await engine.set_speculation(False)
                            await engine.set_speculation(True)  # forgets the prefix cache
                            await engine.set_speculation(way != NONE)
                            drafting: Any = "auto" if way == NONE else way
                            times = max(1, 2 * num_streams // count)  # streams stay full until the last prompts
                            answers, tokens_per_s = await ask(engine, of_domain * times, drafting, num_streams)
                            blocks[num_streams, domain, way].append(timed(answers))
                            row = {"round": number + 1, "streams": num_streams, "domain": domain, "way": way}
                            row |= {"tokens_per_s": round(tokens_per_s, 1)}
                            row |= figures(answers, plain[domain] * times, threshold)
                            rows.append(row)
                            print(*row.values(), flush=True)
            for (num_streams, domain, way), of_way in blocks.items():
                if way != NONE:
                    ratio = compare_blocks(list(zip(of_way, blocks[num_streams, domain, NONE], strict=True)))
                    rows.append({"streams": num_streams, "domain": domain, "way": way, "ratio": ratio.model_dump()})
                    print(
                        num_streams, domain, way, f"{ratio.value:.3f} ({ratio.low:.3f} to {ratio.high:.3f})", flush=True
                    )
        finally:
            await engine.close()
    return rows


def main() -> None:
    """Measure, in a process that has the engine's environment from its start."""
    parser = argparse.ArgumentParser(description="Compare ways of drafting in one compiled engine.")
    parser.add_argument("target", type=Path, help="directory of the registered target, with its golden.json")
    parser.add_argument("draft", type=Path, help="directory of an EAGLE-3 draft for it")
    parser.add_argument("--prompts", type=int, default=16, help="of each domain")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS, help='"none" must be one')
    given = parser.parse_args()
    os.environ.update(served.child_environment() | openmp_preload())
    rows = asyncio.run(measure(given.target, given.draft, given.prompts, given.streams, given.rounds, given.ways))
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
