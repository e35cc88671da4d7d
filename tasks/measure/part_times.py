"""What parts of a model's step take on this machine, for studies that count what several devices would take.

A device's share of a layer is a layer of fewer heads or channels: a model of such layers, with random weights, is timed
through its attentions alone and through its MLPs alone. Where heads don't divide evenly, the fullest device counts.
"""

import queue
import threading
import time
from functools import lru_cache
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from models.layers.decoder import Cache, Decoder, Sublayers
from models.systems import Times
from models.throughput.cost import Cost, Time

CONTEXT, REPEATS, NUM_MEETINGS = 64, 5, 200
ROWS = (1, 2, 4, 8, 16)
DEVICES = (1, 2, 3, 4)


@lru_cache(maxsize=1)
@torch.inference_mode()
def part_times(target_dir: Path) -> Times:
    """Time a model of the shape of a directory's, in float32 with random weights."""
    config = AutoConfig.from_pretrained(target_dir)
    whole = _decoder(config, 1)
    rows_ms = {rows: _ms(whole, rows, Sublayers(frozenset(), frozenset())) for rows in ROWS}
    every, none = frozenset(range(config.num_hidden_layers)), frozenset[int]()
    rest_ms = _ms(whole, 1, Sublayers(every, every))
    attention_ms, mlp_ms = {}, {}
    for number in DEVICES:
        part = whole if number == 1 else _decoder(config, number)
        attention_ms[number] = max(0.0, _ms(part, 1, Sublayers(none, every)) - rest_ms)
        mlp_ms[number] = max(0.0, _ms(part, 1, Sublayers(every, none)) - rest_ms)
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
        started = time.perf_counter()
        there.put(started)
        back.get()
        took.append(1000 * (time.perf_counter() - started) / 2)
    there.put(None)
    worker.join()
    return median(took)


def _decoder(config: Any, num_devices: int) -> Decoder:
    """Return a model of the largest part of each layer that one of so many devices holds."""
    part = type(config).from_dict(config.to_dict())
    part.head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    group = config.num_attention_heads // config.num_key_value_heads
    part.num_key_value_heads = -(-config.num_key_value_heads // num_devices)
    part.num_attention_heads = group * part.num_key_value_heads
    part.intermediate_size = -(-config.intermediate_size // num_devices)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(part, dtype=torch.float32)
    return Decoder(part, model.state_dict(), torch.float32)


def _ms(decoder: Decoder, num_rows: int, skipped: Sublayers) -> float:
    """Return the median of a pass over so many rows behind a context, its output matrix included."""
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
