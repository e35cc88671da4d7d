"""One view over families: what each smaller form of the target keeps, and what it gains where it counts, when served.

Every form that the engine reads on a CPU is made by the tables of a recipe as the build makes it, compared with the
target, and asked for answers without a draft: one stream waits for memory more than it computes, eight at once share
each weight that is read. Peak memory is that of the engine's processes, the room for keys and values included. The seed
draws the text to calibrate and compare on, and the prompts.
"""

import asyncio
import gc
import math
import os
import time
from pathlib import Path
from typing import Any

import torch

from models.core.checkpoints.loading import load_model
from models.engines import Engine, Sampling
from models.engines.vllm import Params
from models.targets import target_config
from tasks.generate_answers import open_engine
from tasks.measure import chain, likeness
from tasks.measure.comparisons import Bench, Row, draw
from tasks.measure.comparisons.shrink import DEPTH, WIDTH, asked

QUESTION = "Which smaller form of the target is answered fastest, and what does it keep?"
BASELINE = "float"
TIMED = True
COLUMNS = {
    **likeness.COLUMNS,
    "one_stream": "one stream, tokens/s (higher is better)",
    "eight_streams": "eight streams, tokens/s (higher is better)",
    "checkpoint_mib": "safetensors, MiB (lower is better)",
    "peak_mib": "the engine's peak memory, MiB (lower is better)",
}
# What can be asked of a form, by the word for it, and whether less is wanted; the fastest of those that fit wins.
BOUNDS = {
    "MiB": ("checkpoint_mib", "most"),
    "MiB peak": ("peak_mib", "most"),
    "KL": ("kl", "most"),
    "% agreement": ("agreement_pct", "least"),
    "τ": ("tau", "least"),
    "tokens/s": ("one_stream", "least"),
}
WINS_BY = "one_stream"
DRAWN = ("eight_streams", "checkpoint_mib", "peak_mib")  # each against KL
STREAMS = 8
PROMPT_TOKENS, NUM_TOKENS, NUM_ROUNDS = 32, 48, 3
LENGTH, READ_TOKENS = 256, 2048
# With 7 bits of 8, sums of products fit 16 bits on processors without VNNI too.
DYNAMIC = {"name": "int8_dynamic", "weight_bits": 7}
GPTQ = {"method": {"name": "gptq", "group_size": 64}}
HALF = {"method": {"name": "sparsegpt"}, "pattern": "2:4"}
FORMS: dict[str, dict[str, Any]] = {
    "int8_dynamic": {"quantize": {"method": DYNAMIC}},
    "int8_static": {"quantize": {"method": {**DYNAMIC, "name": "int8_static"}}},
    "int8_static, down_proj dynamic": {
        "quantize": {"method": {**DYNAMIC, "name": "int8_static"}, "exceptions": {"*.mlp.down_proj": DYNAMIC}}
    },
    "gptq": {"quantize": GPTQ},
    "awq": {"quantize": {"method": {"name": "awq", "group_size": 64}}},
    "2:4, then gptq": {"prune": HALF, "quantize": GPTQ},
    "depth": {"shrink": {"method": {"name": "depth"}}},
    "width": {"shrink": {"method": {"name": "width"}}},
    "depth, then gptq": {"shrink": {"method": {"name": "depth"}}, "quantize": GPTQ},
}
SIZES = {"depth": DEPTH, "width": WIDTH}


def rows(budget: float) -> list[Row]:
    """See `tasks.measure.comparisons`; `budget` scales the text to calibrate on and the answers that are timed."""
    calibrated = {"num_documents": max(2, round(96 * budget)), "max_length": LENGTH}
    scaled = {"quantize": calibrated, "prune": calibrated, "shrink": {"max_length": LENGTH}}
    return [
        Row(BASELINE, {"tables": {}}),
        *(
            Row(name, {"tables": {stage: {**table, **scaled[stage]} for stage, table in tables.items()}})
            for name, tables in FORMS.items()
        ),
    ]


def recipe_tables(row: Row, target_dir: Path) -> dict[str, Any]:
    """Return a row's tables as a recipe takes them, with the sizes of a fifth less than the target's."""
    tables: dict[str, Any] = dict(row.settings["tables"])
    if shrink := tables.get("shrink"):
        sizes, name = asked(target_config(target_dir)), shrink["method"]["name"]
        tables["shrink"] = {**shrink, "method": {"name": name, **{key: sizes[key] for key in SIZES[name]}}}
    return tables


def measure(bench: Bench, row: Row, seed: int) -> dict[str, float]:
    directory = chain.make(bench, recipe_tables(row, bench.target_dir), seed)
    held_out = draw(bench.held_out, max(LENGTH, round(READ_TOKENS * bench.budget)), LENGTH, seed)
    like = likeness.measure_likeness(bench, load_model(directory, device=bench.device), held_out)
    gc.collect()
    one, eight, peak = asyncio.run(_speeds(directory, max(1, round(NUM_ROUNDS * bench.budget)), seed))
    gc.collect()  # the engine is in reference cycles
    return {
        **like,
        "one_stream": one,
        "eight_streams": eight,
        "checkpoint_mib": sum(file.stat().st_size for file in directory.glob("*.safetensors")) / 2**20,
        "peak_mib": peak,
    }


async def _speeds(directory: Path, num_rounds: int, seed: int) -> tuple[float, float, float]:
    """Return tokens a second of one stream and of `STREAMS`, and the MiB that the engine took."""
    params = Params(num_draft_tokens=0, max_model_len=256, max_num_seqs=STREAMS)
    async with open_engine(directory, params) as engine:
        await _answer(engine, 1, seed, "warm-up")
        one = [await _answer(engine, 1, seed + number, f"one-{number}") for number in range(num_rounds)]
        eight = [await _answer(engine, STREAMS, seed + number, f"eight-{number}") for number in range(num_rounds)]
        return _rate(one), _rate(eight), _peak_mib(os.getpid())


async def _answer(engine: Engine, num_streams: int, seed: int, tag: str) -> tuple[int, float]:
    """Answer prompts side by side; returns tokens and seconds. What a token says does not change how long it takes."""
    rng = torch.Generator().manual_seed(seed)
    prompts = torch.randint(3, 256, (num_streams, PROMPT_TOKENS), generator=rng).tolist()
    sampling = Sampling(max_tokens=NUM_TOKENS, ignore_eos=True)
    started = time.perf_counter()
    answers = await asyncio.gather(
        *(engine.generate(prompt, sampling, f"{tag}-{number}") for number, prompt in enumerate(prompts))
    )
    return sum(len(answer.token_ids) for answer in answers), time.perf_counter() - started


def _rate(timed: list[tuple[int, float]]) -> float:
    return sum(tokens for tokens, _ in timed) / sum(seconds for _, seconds in timed)


def _peak_mib(parent: int) -> float:
    """Return the most that the processes below one ever held, each its own most; NaN if there are none."""
    status = {}
    for file in Path("/proc").glob("[0-9]*/status"):
        try:
            fields = dict(line.split(":", 1) for line in file.read_text().splitlines())
        except OSError:  # it has ended
            continue
        if "VmHWM" in fields:
            status[int(fields["Pid"])] = int(fields["PPid"]), int(fields["VmHWM"].split()[0]) / 1024
    below = {parent}
    while found := {pid for pid, (above, _) in status.items() if above in below} - below:
        below |= found
    return sum(status[pid][1] for pid in below - {parent}) or math.nan
