"""What each way to run models on several requests or devices gains, held against what its paper claims.

Prompts are the beginnings of held-out documents that the seed draws, answers are greedy, in float32. A method runs the
plain way and its own on the same work; where that takes devices that are not here, it counts with times that are
measured part by part. `claims` prints what each paper says beside what was seen.

A device's share of a layer is a layer of fewer heads or channels: a model of such layers, with random weights, is timed
through its attentions alone and through its MLPs alone. Where heads don't divide evenly, the fullest device counts.
"""

import math
import queue
import threading
import time
from functools import lru_cache
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from infra.views.comparison import Comparison, number
from infra.views.results import Grid, Report
from models import catalog, systems
from models.core.layers.decoder import Cache, Decoder, Sublayers, WideDecoder
from models.core.layers.reshape import head_dim
from models.core.throughput.cost import Cost, Time
from models.systems import Times
from models.targets import target_config
from tasks.measure import lesson
from tasks.measure.comparisons import Bench, Row

QUESTION = "Which claims about running models on several requests or devices hold, as far as this machine can tell?"
BASELINE = "the plain way"
TIMED = True
COLUMNS = {
    "gain": "plain way / method, × ↑",
    "kept": "kept of the plain way's output, share ↑",
    "shape": "the claim's shape was seen, share of seeds ↑",
}
NUM_PROMPTS, ANSWER_LENGTH = 4, 24
CONTEXT, REPEATS, NUM_MEETINGS = 64, 5, 200
ROWS = (1, 2, 4, 8, 16)
DEVICES = (1, 2, 3, 4)


def rows(budget: float) -> list[Row]:
    """Return every method; `budget` scales the answers, 1 being 24 tokens to each of 4 prompts."""
    return [Row(BASELINE, {}), *(Row(name, {"method": {"name": name}}) for name in catalog.names("systems"))]


def measure(bench: Bench, row: Row, seed: int) -> dict[str, float]:
    if row.name == BASELINE:
        return {"gain": 1.0, "kept": 1.0, "shape": math.nan}
    method = catalog.load("systems", row.settings["method"]["name"])
    decoder = WideDecoder.load(bench.target_dir, torch.float32)
    prompts = lesson.opening(bench.held_out, NUM_PROMPTS, seed)
    given = systems.Given(decoder, prompts, max(4, round(ANSWER_LENGTH * bench.budget)), part_times(bench.target_dir))
    seen: systems.Seen = method.study(given, torch.Generator().manual_seed(seed))
    return {"gain": seen.gain, "kept": seen.kept, "shape": float(seen.holds)}


def claims(report: Report, found: Comparison) -> Report:
    lines = []
    for name, figures in found.figures.items():
        if name == BASELINE:
            continue
        method, held = catalog.load("systems", name), figures["shape"].value
        if held is None:
            raise ValueError(f"{name} says nothing of its shape")
        seen = f"{number(figures['gain'].value)}× in {method.GAIN}; {number(figures['kept'].value)} of {method.KEPT}"
        claim, said = f"{method.CLAIM} ({method.PAPER})", systems.verdict(held, method.NEEDS)
        lines.append([name, claim, method.SHAPE, seen, said])
    grid = Grid("claims", ["method", "the paper", "its shape", "seen", "verdict"], lines)
    figures = report.figures | {"claims": {line[0]: line[-1] for line in lines}}
    return report.model_copy(update={"figures": figures, "grids": [*report.grids, grid]})


@lru_cache(maxsize=1)
@torch.inference_mode()
def part_times(target_dir: Path) -> Times:
    config = target_config(target_dir)
    whole = _decoder(config, 1)
    rows_ms = {rows: _ms(whole, rows, Sublayers(frozenset(), frozenset())) for rows in ROWS}
    every, none = frozenset(range(config.num_hidden_layers)), frozenset[int]()
    rest_ms = _ms(whole, 1, Sublayers(every, every))
    attention_ms, mlp_ms = {}, {}
    for num_devices in DEVICES:
        part = whole if num_devices == 1 else _decoder(config, num_devices)
        attention_ms[num_devices] = max(0.0, _ms(part, 1, Sublayers(none, every)) - rest_ms)
        mlp_ms[num_devices] = max(0.0, _ms(part, 1, Sublayers(every, none)) - rest_ms)
    cost = Cost.measured([Time(1, rows, 0, ms) for rows, ms in rows_ms.items()])
    return Times(cost, attention_ms, mlp_ms, rest_ms, meet_ms())


def meet_ms() -> float:
    """Return what handing something to a thread that waits for it takes: half of there and back."""
    there: queue.SimpleQueue[float | None] = queue.SimpleQueue()
    back: queue.SimpleQueue[float] = queue.SimpleQueue()

    def answer() -> None:
        while (asked := there.get()) is not None:
            back.put(asked)

    worker = threading.Thread(target=answer)
    worker.start()
    took = []
    for _ in range(NUM_MEETINGS):
        there.put(time.perf_counter())
        started = back.get()
        took.append(1000 * (time.perf_counter() - started) / 2)
    there.put(None)
    worker.join()
    return median(took)


def _decoder(config: Any, num_devices: int) -> Decoder:
    """Return a model of the largest part of each layer that one of so many devices holds."""
    part = type(config).from_dict(config.to_dict())
    part.head_dim = head_dim(config)
    group = config.num_attention_heads // config.num_key_value_heads
    part.num_key_value_heads = -(-config.num_key_value_heads // num_devices)
    part.num_attention_heads = group * part.num_key_value_heads
    part.intermediate_size = -(-config.intermediate_size // num_devices)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(part, dtype=torch.float32)
    return Decoder(part, model.state_dict(), torch.float32)


def _ms(decoder: Decoder, num_rows: int, skipped: Sublayers) -> float:
    cache = Cache(decoder, CONTEXT + num_rows)
    decoder.forward(torch.zeros(CONTEXT, dtype=torch.int64), cache)
    rows = torch.zeros(num_rows, dtype=torch.int64)
    took = []
    for _ in range(1 + REPEATS):
        started = time.perf_counter()
        states, _ = decoder.partial(rows, cache, skipped)
        decoder.logits(states)
        took.append(1000 * (time.perf_counter() - started))
        cache.keep(CONTEXT, [])
    return median(took[1:])  # the first one warms up
