"""Shrinking: what four fifths of the target still say, and what the rest was worth.

One-shot methods cut the target and are read as they are; a row "…, trained" trains the cut model on, and `sheared`
learns its masks on the same documents, so that these have learnt from equally many tokens. They learn the looks of the
traffic too, so that "full, trained" is what to hold them against. At budget 1 they learn from two thousand tokens, a
few steps, and the paper from 50 billion: raise the budget before judging `sheared`.

`vocabulary` is read on the stretches of text between tokens that it lost; `coverage` is the share of tokens it kept.
`low_rank` comes at several ranks: its files stay dense, its parameters are those of its factors, and what the rank
costs shows in `error`, the distance from the target's last hidden states, for models as wide as the target.
"""

import copy
import math
import statistics
import time
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from models import catalog, training
from models.loading import moved
from models.params import TrainingParams
from models.perplexity import perplexity, score
from models.shrink import num_parameters
from tasks.measure.comparisons import Bench, Row, draw

QUESTION = "Which way of making the target a fifth smaller keeps most of it, and what does each save?"
BASELINE = "full"
COLUMNS = {
    "perplexity": "held-out perplexity (lower is better)",
    "coverage": "held-out tokens in the vocabulary (share, higher is better)",
    "error": "distance of last hidden states from the target's, relative (lower is better)",
    "parameters_m": "parameters (million, lower is better)",
    "checkpoint_mib": "safetensors in bfloat16 (MiB, lower is better)",
    "tokens_per_s": "forward, float32 (tokens/s, higher is better)",
    "seconds": "to shrink and train (s, lower is better)",
}
KEPT = 0.8
LENGTH = 256
READ_TOKENS, CALIBRATION_TOKENS, TRAIN_TOKENS = 1024, 1024, 2048
TRAINING = TrainingParams(learning_rate=3e-4, batch_tokens=512, max_length=LENGTH)
DEPTH = ("num_layers",)
WIDTH = ("num_heads", "num_kv_heads", "intermediate_size")


def rows(budget: float) -> list[Row]:
    """See `tasks.measure.comparisons`; `budget` scales the tokens that are read, calibrated on and trained on."""
    shares = {f"low_rank {share:g}": {"name": "low_rank", "share": share} for share in (KEPT, 0.5)}
    return [
        Row("full", {"method": None}),
        Row("full, trained", _settings({}, (), trained=True)),
        Row("depth", _settings({"name": "depth"}, DEPTH)),
        Row("depth, spread", _settings({"name": "depth", "keep": "spread"}, DEPTH)),
        Row("depth, trained", _settings({"name": "depth"}, DEPTH, trained=True)),
        Row("width", _settings({"name": "width"}, WIDTH)),
        Row("width, trained", _settings({"name": "width"}, WIDTH, trained=True)),
        Row("sheared", _settings({"name": "sheared"}, WIDTH, learns=True)),
        Row("vocabulary", _settings({"name": "vocabulary"}, ("vocab_size",))),
        *(Row(name, _settings(method, ())) for name, method in shares.items()),
    ]


def measure(bench: Bench, row: Row, seed: int) -> dict[str, float]:
    """See `tasks.measure.comparisons`."""
    full = AutoModelForCausalLM.from_pretrained(bench.target_dir, dtype=torch.float32)
    held_out = draw(bench.held_out, _scaled(READ_TOKENS, bench), LENGTH, seed)
    started = time.perf_counter()
    model = full if row.settings["method"] is None else _shrunk(full, bench, row, seed)
    seconds = math.nan if model is full else time.perf_counter() - started
    kept = getattr(model.config, "redraft", {}).get("kept_tokens")
    readable = held_out if kept is None else _readable(held_out, kept)
    return {
        "perplexity": perplexity(score(model, readable, LENGTH)),
        "coverage": 1.0 if kept is None else _coverage(held_out, kept),
        "error": _error(model, full, held_out[:4]),
        "parameters_m": num_parameters(model) / 1e6,
        "tokens_per_s": _speed(model),
        "seconds": seconds,
        "checkpoint_mib": _checkpoint_mib(model, bench),  # last: it leaves the model in bfloat16
    }


def asked(config: Any) -> dict[str, int]:
    """Return sizes that each keep about KEPT of the blocks' weights, or save about as much in the vocabulary."""
    num_kv_heads = max(1, round(KEPT * config.num_key_value_heads))
    return {
        "num_layers": min(round(KEPT * config.num_hidden_layers), config.num_hidden_layers - 1),
        "num_kv_heads": num_kv_heads,
        "num_heads": num_kv_heads * config.num_attention_heads // config.num_key_value_heads,
        "intermediate_size": max(64, int(KEPT * config.intermediate_size) // 64 * 64),
        "vocab_size": config.vocab_size // 3,
    }


def _settings(
    method: dict[str, Any], sizes: tuple[str, ...], trained: bool = False, learns: bool = False
) -> dict[str, Any]:
    return {"method": method, "sizes": list(sizes), "trained": trained, "learns": learns}


def _scaled(num_tokens: int, bench: Bench) -> int:
    return max(2 * LENGTH, round(num_tokens * bench.budget))


def _shrunk(full: PreTrainedModel, bench: Bench, row: Row, seed: int) -> PreTrainedModel:
    sizes = asked(full.config)
    to_train = draw(bench.train, _scaled(TRAIN_TOKENS, bench), LENGTH, seed)
    calibration = draw(bench.train, _scaled(CALIBRATION_TOKENS, bench), LENGTH, seed)
    documents = to_train if row.settings["learns"] else calibration
    if "vocab_size" in row.settings["sizes"]:  # counting costs nothing
        documents = [document for domain in bench.train.values() for document in domain]
    model: PreTrainedModel
    if row.settings["method"]:
        params = catalog.parse("shrink", row.settings["method"] | {key: sizes[key] for key in row.settings["sizes"]})
        model = catalog.load("shrink", params.name).shrink(full, documents, params, TRAINING, seed)
    else:
        model = copy.deepcopy(full)
    if row.settings["trained"]:
        training.train(model, to_train, TRAINING, seed=seed)
    return model


def _readable(documents: list[list[int]], kept: list[int]) -> list[list[int]]:
    runs = (run for document in documents for run in catalog.load("shrink", "vocabulary").narrow(document, kept))
    return [run for run in runs if len(run) > 1]


def _coverage(documents: list[list[int]], kept: list[int]) -> float:
    known = set(kept)
    return statistics.fmean(token in known for document in documents for token in document)


@torch.no_grad()
def _error(model: PreTrainedModel, full: PreTrainedModel, documents: list[list[int]]) -> float:
    if model.config.hidden_size != full.config.hidden_size or model.config.vocab_size != full.config.vocab_size:
        return math.nan

    def states(one: PreTrainedModel) -> Tensor:
        return torch.cat([one.model(torch.tensor([ids]), use_cache=False).last_hidden_state[0] for ids in documents])

    wanted = states(full)
    return float((states(model) - wanted).norm() / wanted.norm())


@torch.no_grad()
def _speed(model: PreTrainedModel) -> float:
    """Return tokens a second of one sequence, the median of five after one that warms up."""
    token_ids = torch.arange(LENGTH)[None] % model.config.vocab_size
    seconds = []
    for _ in range(6):
        started = time.perf_counter()
        model(token_ids, use_cache=False)
        seconds.append(time.perf_counter() - started)
    return LENGTH / statistics.median(seconds[1:])


def _checkpoint_mib(model: PreTrainedModel, bench: Bench) -> float:
    directory = bench.work_dir / "checkpoint"
    moved(model, torch.bfloat16).save_pretrained(directory)
    return sum(file.stat().st_size for file in directory.glob("*.safetensors")) / 2**20
