"""What a smaller target gains where it counts: in the production engine.

Every form that the engine reads on a CPU, quantized or cut, is stored as the build stores it and then asked for answers
without a draft; `rtn` and `qat` are stored as `gptq` is, and `fp8` needs units that few processors have. One stream
waits for memory more than it computes, so that fewer bytes pay there first; eight at once share each weight that is
read. The seed draws the text to calibrate on and the prompts. What each form costs in quality is in the tables of
`quantize` and `shrink`.
"""

import asyncio
import gc
import time
from pathlib import Path
from typing import Any

import torch

from models import catalog, quantize
from models.engines import Engine, Sampling
from models.engines.vllm import Params
from models.loading import complete, load_model, save_model
from models.params import TrainingParams
from tasks.generate_answers import open_engine
from tasks.measure.comparisons import Bench, Row, draw
from tasks.measure.comparisons.shrink import DEPTH, WIDTH, asked

QUESTION = "Which smaller forms of the target does the engine answer faster?"
BASELINE = "float"
COLUMNS = {
    "one_stream": "one stream, tokens/s (higher is better)",
    "eight_streams": "eight streams, tokens/s (higher is better)",
    "checkpoint_mib": "safetensors, MiB (lower is better)",
}
STREAMS = 8
PROMPT_TOKENS, NUM_TOKENS, NUM_ROUNDS = 32, 48, 3
CALIBRATION_TOKENS, LENGTH = 1024, 128
# With 7 bits of 8, sums of products fit 16 bits on processors without VNNI too.
QUANTIZED = {
    "int8_dynamic": {"weight_bits": 7},
    "int8_static": {"weight_bits": 7},
    "gptq": {"group_size": 64},
    "awq": {"group_size": 64},
}
SHRUNK = {"depth": DEPTH, "width": WIDTH, "vocabulary": ("vocab_size",)}


def rows(budget: float) -> list[Row]:
    """See `tasks.measure.comparisons`; `budget` scales the answers that are timed."""
    return [
        Row(BASELINE, {}),
        *(Row(name, {"quantize": {"name": name, **settings}}) for name, settings in QUANTIZED.items()),
        *(Row(name, {"shrink": {"name": name}, "sizes": list(sizes)}) for name, sizes in SHRUNK.items()),
    ]


def measure(bench: Bench, row: Row, seed: int) -> dict[str, float]:
    """See `tasks.measure.comparisons`."""
    directory = _store(bench, row.settings, seed)
    one, eight = asyncio.run(_speeds(directory, max(1, round(NUM_ROUNDS * bench.budget)), seed))
    gc.collect()  # the engine is in reference cycles
    return {
        "one_stream": one,
        "eight_streams": eight,
        "checkpoint_mib": sum(file.stat().st_size for file in directory.glob("*.safetensors")) / 2**20,
    }


def _store(bench: Bench, settings: dict[str, Any], seed: int) -> Path:
    """Return a directory that the engine loads."""
    if not settings:
        return bench.target_dir
    directory = bench.work_dir / "target"
    directory.mkdir()
    model = load_model(bench.target_dir)
    documents = draw(bench.train, CALIBRATION_TOKENS, LENGTH, seed)
    if "quantize" in settings:
        params = catalog.parse("quantize", settings["quantize"])
        quantize.save(catalog.load("quantize", params.name).quantize(model, documents, params), directory)
        complete(directory, bench.target_dir)
        return directory
    sizes = asked(model.config)
    params = catalog.parse("shrink", settings["shrink"] | {key: sizes[key] for key in settings["sizes"]})
    shrunk = catalog.load("shrink", params.name).shrink(model, documents, params, TrainingParams(), seed)
    save_model(shrunk, directory, bench.target_dir)
    return directory


async def _speeds(directory: Path, num_rounds: int, seed: int) -> tuple[float, float]:
    """Return tokens a second of one stream and of `STREAMS`."""
    params = Params(num_draft_tokens=0, max_model_len=256, max_num_seqs=STREAMS)
    async with open_engine(directory, params) as engine:
        await _answer(engine, 1, seed, "warm-up")
        one = [await _answer(engine, 1, seed + number, f"one-{number}") for number in range(num_rounds)]
        eight = [await _answer(engine, STREAMS, seed + number, f"eight-{number}") for number in range(num_rounds)]
    return _rate(one), _rate(eight)


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
