"""Shrinking: what four fifths of the target still say, and what the rest was worth.

A row "…, trained" trains the cut model on. `sheared` goes through its documents until its masks have had `MASK_STEPS`
steps, where the paper's have 50 billion tokens: "width, trained as sheared" learns from as many. Trained rows learn the
looks of the traffic too, so that "full, trained" is what to hold them against. "…, by lot" is the control that draws
which blocks, or which heads and channels, stay.

"…, then qat" and "…, then lora" are chains of a recipe's stages, made as the build makes them, which train on as many
tokens as "trained" rows do. Rows that train do so at the learning rate that suits each best; that of `sheared`, and of
what trains as long, is looked for with a quarter of the steps.

`vocabulary` is read on the stretches of text between tokens that it lost; `coverage` is the share of tokens it kept.
`low_rank` keeps factors, which the reference engine runs; the forward pass that is timed here multiplies by whole
matrices. `error` is the distance from the target's last hidden states, for models as wide as the target.
"""

import copy
import math
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from models import catalog
from models.adapters import lora
from models.core.checkpoints.loading import load_model, save_model
from models.core.evaluation import spread
from models.core.evaluation.perplexity import perplexity, score
from models.core.layers.linears import enough_tokens
from models.core.layers.reshape import Kept, take_layers, take_widths
from models.core.learning import training
from models.params import TrainingParams
from models.shrink import choose, choose_heads, num_stored, shape_of
from models.targets import target_config
from tasks.measure import chain, likeness, sweep
from tasks.measure.comparisons import Bench, Row, draw

QUESTION = "Which way of making the target a fifth smaller keeps most of it, and what does each save?"
BASELINE = "full"
COLUMNS = {
    "perplexity": "held-out perplexity (lower is better)",
    **likeness.COLUMNS,
    "coverage": "held-out tokens in the vocabulary (share, higher is better)",
    "error": "distance of last hidden states from the target's, relative (lower is better)",
    "parameters_m": "parameters (million, lower is better)",
    **chain.COLUMNS,
    "checkpoint_mib": "safetensors (MiB, lower is better)",
    "tokens_per_s": "forward, float32 (tokens/s, higher is better)",
    **sweep.COLUMNS,
    "seconds": "to shrink and train at that rate (s, lower is better)",
}
KEPT = 0.8
LENGTH = 256
READ_TOKENS, TRAIN_TOKENS = 2048, 2048
TRAINING = TrainingParams(learning_rate=3e-4, batch_tokens=512, max_length=LENGTH)
MASK_STEPS = 200  # below which masks choose at random
# Chain to where its sweep begins.
CHAINS = {"depth, then qat": TRAINING.learning_rate, "low_rank 0.8, then lora": lora.LEARNING_RATE}
QAT, LORA = {"name": "qat", "group_size": 64}, {"name": "lora"}
DEPTH = ("num_layers",)
WIDTH = ("num_heads", "num_kv_heads", "intermediate_size")


def rows(budget: float) -> list[Row]:
    """See `tasks.measure.comparisons`; `budget` scales the tokens that are read, calibrated on and trained on."""
    mask_steps = max(1, round(MASK_STEPS * budget))
    shearing = {"name": "sheared", "min_mask_steps": mask_steps}
    shares = {f"low_rank {share:g}": {"name": "low_rank", "share": share, "keep": "factors"} for share in (KEPT, 0.5)}
    return [
        Row("full", {"method": None}),
        Row("full, trained", _settings({}, (), trained=True)),
        Row("depth", _settings({"name": "depth"}, DEPTH)),
        Row("depth, spread", _settings({"name": "depth", "keep": "spread"}, DEPTH)),
        Row("depth, by lot", _settings({}, DEPTH, by_lot=True)),
        Row("depth, trained", _settings({"name": "depth"}, DEPTH, trained=True)),
        Row("depth, by lot, trained", _settings({}, DEPTH, by_lot=True, trained=True)),
        Row("width", _settings({"name": "width"}, WIDTH)),
        Row("width, by lot", _settings({}, WIDTH, by_lot=True)),
        Row("width, trained", _settings({"name": "width"}, WIDTH, trained=True)),
        Row("sheared", _settings(shearing, WIDTH, learns=True)),
        Row("width, trained as sheared", _settings({"name": "width"}, WIDTH, trained=True, mask_steps=mask_steps)),
        Row("vocabulary", _settings({"name": "vocabulary"}, ("vocab_size",))),
        *(Row(name, _settings(method, ())) for name, method in shares.items()),
        *(Row(name, {**_settings({}, ()), "chain": name, "learning_rate": rate}) for name, rate in CHAINS.items()),
    ]


def chain_tables(name: str, bench: Bench, rate: float) -> dict[str, Any]:
    """Return the tables of a chain, as a recipe takes them; it trains on one domain, the first by name."""
    loop = {"max_length": LENGTH, "batch_tokens": TRAINING.batch_tokens, "learning_rate": rate}
    if name == "depth, then qat":
        sizes = asked(target_config(bench.target_dir))
        return {
            "shrink": {"method": {"name": "depth", "num_layers": sizes["num_layers"]}, "max_length": LENGTH},
            "quantize": {"method": QAT, **loop},
        }
    return {
        "shrink": {"method": {"name": "low_rank", "share": KEPT, "keep": "factors"}, "max_length": LENGTH},
        "finetune": {"method": LORA, "domain": min(bench.train), **loop},
    }


def tune(bench: Bench, row: Row, seed: int) -> float:
    held_out = draw(bench.held_out, _scaled(READ_TOKENS, bench), LENGTH, seed)
    chained = "chain" in row.settings
    model = load_model(_chain(bench, row, seed) if chained else bench.target_dir, device=bench.device)
    if not chained:
        model = _shrunk(model, bench, _shorter(row), seed)
    return spread.nats_per_token(score(model, held_out, LENGTH))


def measure(bench: Bench, row: Row, seed: int) -> dict[str, float]:
    full = load_model(bench.target_dir, device=bench.device)
    held_out = draw(bench.held_out, _scaled(READ_TOKENS, bench), LENGTH, seed)
    started = time.perf_counter()
    chained = _chain(bench, row, seed) if "chain" in row.settings else None
    model = load_model(chained, device=bench.device) if chained else full
    if row.settings["method"] is not None and not chained:
        model = _shrunk(full, bench, row, seed)
    seconds = math.nan if model is full else time.perf_counter() - started
    kept = getattr(model.config, "redraft", {}).get("kept_tokens")
    scores = score(model, held_out if kept is None else _readable(held_out, kept), LENGTH)
    return {
        # A smaller vocabulary reads other stretches of text than the target's, so that no document can be paired.
        "perplexity": spread.perplexity(scores) if kept is None else perplexity(scores),
        **likeness.measure_likeness(bench, model, held_out),
        "coverage": 1.0 if kept is None else _coverage(held_out, kept),
        "error": _error(model, full, held_out[:4]),
        "parameters_m": num_stored(model) / 1e6,
        "promised": chain.num_promised(model.config) if chained else math.nan,
        "tokens_per_s": _speed(model),
        "rate": sweep.rate_of(row),
        "seconds": seconds,
        "checkpoint_mib": _mib(chained or _saved(model, bench)),  # last: it changes the format
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
    method: dict[str, Any],
    sizes: tuple[str, ...],
    trained: bool = False,
    learns: bool = False,
    by_lot: bool = False,
    mask_steps: int | None = None,
) -> dict[str, Any]:
    rate = TRAINING.learning_rate if trained or learns else None
    how = {"trained": trained, "learns": learns, "by_lot": by_lot, "mask_steps": mask_steps}
    return {"method": method, "sizes": list(sizes), **how, "learning_rate": rate}


def _shorter(row: Row) -> Row:
    """Return a row with a quarter of the steps, if it has as many as masks need."""
    method, steps = dict(row.settings["method"]), row.settings["mask_steps"]
    if "min_mask_steps" in method:
        method["min_mask_steps"] = max(1, method["min_mask_steps"] // 4)
    return row._replace(settings={**row.settings, "method": method, "mask_steps": steps and max(1, steps // 4)})


def _scaled(num_tokens: int, bench: Bench) -> int:
    return max(2 * LENGTH, round(num_tokens * bench.budget))


def _shrunk(full: PreTrainedModel, bench: Bench, row: Row, seed: int) -> PreTrainedModel:
    sizes = {key: size for key, size in asked(full.config).items() if key in row.settings["sizes"]}
    to_train = draw(bench.train, _scaled(TRAIN_TOKENS, bench), LENGTH, seed)
    calibration = draw(bench.train, _scaled(enough_tokens(full), bench), LENGTH, seed)
    documents = to_train if row.settings["learns"] else calibration
    if "vocab_size" in row.settings["sizes"]:  # counting costs nothing
        documents = [document for domain in bench.train.values() for document in domain]
    loop = TRAINING.model_copy(update={"learning_rate": row.settings["learning_rate"] or TRAINING.learning_rate})
    model: PreTrainedModel
    if row.settings["method"]:
        params = catalog.parse("shrink", row.settings["method"] | sizes)
        settings = _long_enough(row.settings["method"].get("min_mask_steps"), loop, documents)
        model = catalog.load("shrink", params.name).shrink(full, documents, params, settings, seed)
    else:
        model = _by_lot(full, sizes, seed) if row.settings["by_lot"] else copy.deepcopy(full)
    if row.settings["trained"]:
        training.train(model, to_train, _long_enough(row.settings["mask_steps"], loop, to_train), seed=seed)
    return model


def _by_lot(full: PreTrainedModel, sizes: dict[str, int], seed: int) -> PreTrainedModel:
    """Cut a model to sizes of DEPTH or of WIDTH, and draw what stays."""
    rng, config = torch.Generator().manual_seed(seed), full.config
    num_layers, num_kv_heads = config.num_hidden_layers, config.num_key_value_heads
    if "num_layers" in sizes:
        return take_layers(full, choose(torch.rand(num_layers, generator=rng), sizes["num_layers"]).tolist())
    shape = shape_of(full)._replace(**sizes)
    heads = torch.rand(num_layers, num_kv_heads, config.num_attention_heads // num_kv_heads, generator=rng)
    kept_heads, kept_kv_heads = choose_heads(heads, torch.rand(num_layers, num_kv_heads, generator=rng), shape)
    channels = choose(torch.rand(num_layers, config.intermediate_size, generator=rng), shape.intermediate_size)
    return take_widths(full, Kept(heads=kept_heads, kv_heads=kept_kv_heads, channels=channels))


def _long_enough(mask_steps: int | None, settings: TrainingParams, documents: list[list[int]]) -> TrainingParams:
    """Return settings under which half of the documents make as many steps as masks need, the same where none do."""
    if mask_steps is None:
        return settings
    short = settings.model_copy(update={"batch_tokens": LENGTH})
    num_epochs = math.ceil(3 * mask_steps / training.num_steps(documents, short))
    return short.model_copy(update={"num_epochs": num_epochs})


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
        read = [torch.tensor([ids], device=one.device) for ids in documents]
        return torch.cat([one.model(ids, use_cache=False).last_hidden_state[0] for ids in read])

    wanted = states(full)
    return float((states(model) - wanted).norm() / wanted.norm())


@torch.no_grad()
def _speed(model: PreTrainedModel) -> float:
    token_ids = torch.arange(LENGTH, device=model.device)[None] % model.config.vocab_size
    seconds = []
    for _ in range(6):
        started = time.perf_counter()
        float(model(token_ids, use_cache=False).logits[0, -1, 0])  # waits until a GPU has done it
        seconds.append(time.perf_counter() - started)
    return LENGTH / statistics.median(seconds[1:])


def _saved(model: PreTrainedModel, bench: Bench) -> Path:
    directory = bench.work_dir / "checkpoint"
    directory.mkdir()
    save_model(model, directory, bench.target_dir)
    return directory


def _mib(directory: Path) -> float:
    return sum(file.stat().st_size for file in directory.glob("*.safetensors")) / 2**20


def _chain(bench: Bench, row: Row, seed: int) -> Path:
    documents = draw(bench.train, _scaled(TRAIN_TOKENS, bench), LENGTH, seed)
    few = bench._replace(train={min(bench.train): documents})
    return chain.make(few, chain_tables(row.settings["chain"], few, row.settings["learning_rate"]), seed)
