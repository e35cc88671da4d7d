"""Whether a stream says the same with a draft and without, and beside others: greedy answers to chats, token by token.

    python -m tests.benchmarks.equal_bits [--target DIR] [--draft DIR] [--batch-invariant --streams 1 4 16 64]

Two engines of one mode follow each other, one that drafts by the head alone and one that looks up as well. Each answers
first without speculation and then with it, so many prompts at a time as `--streams` says, in turn. All are held against
the first, which is one stream's without speculation. Both engines begin with a table of costs by which drafting pays,
so that as much is drafted as can be. The cost of `--batch-invariant` is what tokens a second and first tokens lose by
it: run both in turn, on an idle machine.
`ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16` masks AMX. Chats are the first of files of `../shared/data`; other files of such
rows can be named. Without directories SmolLM2 out of its wheel is the target, and an untrained EAGLE-3 head the draft.
Ends with one JSON line, and with 1 where an answer differs.
"""

import argparse
import asyncio
import hashlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import vllm
from transformers import AutoTokenizer

from infra.machine import openmp_preload
from models.chats import ChatEncoder
from models.core.drafting.draft_families import family_named
from models.core.evaluation.golden import first_difference
from models.core.layers.kernels import fast_dtype
from models.core.throughput.cost import Cost, Time, save_cost
from models.engines import Completion, LookUp, Sampling, Way
from models.engines import vllm as served
from models.engines.vllm.engine import VllmEngine
from models.engines.vllm.measuring import measured_for, place_of
from models.lengths import goodput
from models.targets import smollm2
from tests.conftest import shake

DATA = Path(__file__).parents[3] / "shared" / "data"
SETS = ("gsm8k", "mbpp", "wikisql", "banking77")
CHEAP = (
    *(Time(num, num * rows, 0, 15.0 + 0.01 * num * rows) for num in (1, 8) for rows in (1, 4, 9)),
    *(Time(num, num, 1, ms) for num, ms in ((1, 15.1), (8, 15.5))),
)
WAYS = {"head alone": LookUp(num_tokens=0), "with look-up": LookUp(shortest=2)}


def read_prompts(files: Sequence[Path], count: int, target: Path) -> dict[str, list[int]]:
    """Return the first `count` chats of each file; ValueError where there is no such file."""
    tokenizer = AutoTokenizer.from_pretrained(target)
    prompts = {}
    for file in files:
        if not file.is_file():
            raise ValueError(f"there is no {file}; name files of rows with messages by --data")
        for number, line in enumerate(file.read_text().splitlines()[:count]):
            messages = [one for one in json.loads(line)["messages"] if one["role"] != "assistant"]
            prompts[f"{file.stem}-{number}"] = ChatEncoder.of(tokenizer).encode(messages)
    return prompts


async def answers(
    engine: VllmEngine, prompts: dict[str, list[int]], sampling: Sampling, side: str, streams: int
) -> tuple[dict[str, Completion], dict[str, float]]:
    """Ask so many prompts at a time, from a cold prefix cache; return the answers and how fast they came."""
    await engine.forget_answers()
    gate, start_s = asyncio.Semaphore(streams), time.monotonic()

    async def answer(name: str) -> Completion:
        async with gate:
            return await engine.generate(prompts[name], sampling, f"{side}-{streams}-{name}")

    found = dict(zip(prompts, await asyncio.gather(*map(answer, prompts)), strict=True))
    num_tokens = sum(len(one.token_ids) for one in found.values())
    return found, {
        "tokens_per_s": round(num_tokens / (time.monotonic() - start_s), 1),
        "first_token_ms": round(statistics.median(one.first_token_ms for one in found.values()), 1),
    }


async def compare(
    target: Path,
    draft: Path,
    prompts: dict[str, list[int]],
    max_tokens: int,
    eager: bool,
    ways: Sequence[str],
    costs: Path,
    all_streams: Sequence[int] = (1,),
    batch_invariant: bool = False,
) -> dict[str, dict[str, Any]]:
    """Return what came of each way and number of streams."""
    figures: dict[str, dict[str, Any]] = {}
    first: dict[str, Completion] = {}
    for way in ways:
        params = served.Params(
            max_model_len=2048,
            max_num_seqs=max(8, *all_streams),
            enforce_eager=eager,
            lookup=WAYS[way],
            lengths=goodput.Params(explore=0.0),
            batch_invariant=batch_invariant,
        )
        write_costs(target, draft, params, costs)
        engine = await VllmEngine.start(target, draft, params, costs=costs)
        try:
            drafting: Way = "auto" if WAYS[way].num_tokens else "head"
            sampling = Sampling(max_tokens=max_tokens, drafting=drafting)
            for streams in all_streams:
                await engine.set_speculation(False)
                off, speed_off = await answers(engine, prompts, sampling, "off", streams)
                await engine.set_speculation(True)
                on, speed_on = await answers(engine, prompts, sampling, "on", streams)
                first = first or off
                found = {"mode": str(engine.mode), **summarise(on, first), "off": speed_off, "on": speed_on}
                found["off_as_first"] = sum(off[name].token_ids == first[name].token_ids for name in prompts)
                figures[f"{way}, {streams} at a time"] = found
                print(way, streams, found, flush=True)
        finally:
            await engine.close()
    return figures


def write_costs(target: Path, draft: Path, params: served.Params, folder: Path) -> None:
    """Leave the table for the engine that starts next."""
    dtype, most = str(fast_dtype("cpu")).removeprefix("torch."), max(params.num_draft_tokens, params.lookup.num_tokens)
    place = place_of(params, "cpu")
    facts = measured_for(target, draft, dtype, params.enforce_eager is True, vllm.__version__, 1 + most, place)
    save_cost(Cost.measured(CHEAP, facts), folder / f"{hashlib.sha256(facts.encode()).hexdigest()[:16]}.json")


def summarise(on: dict[str, Completion], off: dict[str, Completion]) -> dict[str, Any]:
    """Return how many answers are equal, where others part, and how much was accepted."""
    parts = {name: first_difference(off[name].token_ids, one.token_ids) for name, one in on.items()}
    steps, accepted = (
        sum(map(count, on.values())) for count in (lambda one: len(one.accepted), lambda one: sum(one.accepted))
    )
    return {
        "equal": sum(at is None for at in parts.values()),
        "of": len(parts),
        "parts_at": {name: at for name, at in parts.items() if at is not None},
        "tau": round(1 + accepted / max(steps, 1), 3),
        "rows": sorted({1 + num for one in on.values() for num in one.drafted}),
    }


def make_draft(target: Path, directory: Path) -> Path:
    """Save an untrained head."""
    counts = np.zeros(json.loads((target / "config.json").read_text())["vocab_size"])
    counts[:4096] = 1
    family = family_named("eagle3")
    head = family.create(family.Params(vocab_size=4096), target, counts)
    shake(head, 0.02, seed=0)
    family.save(head, directory)
    return directory


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Hold answers with a draft against those without.")
    parser.add_argument("--target", type=Path, help="a directory")
    parser.add_argument("--draft", type=Path, help="a directory")
    parser.add_argument("--data", type=Path, nargs="+", default=[DATA / f"{name}.jsonl" for name in SETS], help="files")
    parser.add_argument("--prompts", type=int, default=12, help="of each file")
    parser.add_argument("--tokens", type=int, default=100, help="of each answer")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=[*WAYS], help="how to draft")
    parser.add_argument("--streams", type=int, nargs="+", default=[1], help="prompts at a time; the first one is 1")
    parser.add_argument("--batch-invariant", action="store_true", help="[engine] batch_invariant")
    parser.add_argument("--eager", action="store_true", help="compile nothing")
    given = parser.parse_args()
    os.environ.update(served.child_environment() | openmp_preload())
    with tempfile.TemporaryDirectory() as folder:
        if (target := given.target) is None:
            (target := Path(folder, "target")).mkdir()
            smollm2.build(smollm2.Params(), target)
        if (draft := given.draft) is None:
            (draft := Path(folder, "draft")).mkdir()
            make_draft(target, draft)
        chats = read_prompts(given.data, given.prompts, target)
        options = (given.tokens, given.eager, given.ways, Path(folder), given.streams, given.batch_invariant)
        found = asyncio.run(compare(target, draft, chats, *options))
    print(json.dumps(found))
    sys.exit(any(one["equal"] < one["of"] or one["off_as_first"] < one["of"] for one in found.values()))
