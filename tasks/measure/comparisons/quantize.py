"""Every quantization method on the target, LLM.int8()'s table on a target with planted outliers, and trained forms.

Rows of three kinds, each with a float row of its own to be read against:

- plain names: the target as it is, each method at its defaults but for one grid that all of 4 bits share, groups of 64
  (128 does not divide every width) with zero points; "…, symmetric" is without those. "finetuned, then …" trains as
  much without rounding as those that train first, so that what is learnt of the text is not put down to the method;
  "2:4, then …" rounds what was pruned before, and the zeroes are looked for in what comes out; "… of the text" are
  calibrated on less and on more; "…, down_proj dynamic" excepts the layers that `sensitivity` names;
- "outliers …": the target after some features were scaled up and the weights that read them down, which changes nothing
  in floats. The rows are those of LLM.int8()'s Table 1;
- "scratch …": a small Llama with the target's vocabulary, trained from nothing, because the target is too large to be.

The seed draws the documents; calibrated is on `ENOUGH` tokens for each input of the widest layer. Rows that train do so
at the learning rate that suits each best. Seconds are the simulation's, not an engine's.
"""

import math
import time
from random import Random
from typing import Any

import torch
from transformers import PreTrainedModel

from models import catalog, quantize
from models.core.checkpoints import invariants, mixed
from models.core.checkpoints.loading import load_model
from models.core.checkpoints.sparsity import Pattern
from models.core.evaluation.perplexity import score
from models.core.evaluation.spread import nats_per_token, perplexity
from models.core.layers.linears import blocks, enough_tokens
from models.core.layers.reshape import head_dim
from models.core.learning import training
from models.params import TrainingParams
from models.prune import prune_model
from models.quantize import BLOCK, Quantized
from models.targets import target_config
from tasks.measure import chain, evidence, likeness, sweep
from tasks.measure.comparisons import Bench, Row, draw, up_to

QUESTION = "What does each form of fewer bits cost in perplexity, and what does it save?"
BASELINE = "float"
COLUMNS = {
    "perplexity": "perplexity of held-out text (lower is better)",
    **likeness.COLUMNS,
    "calibrated_tokens": "tokens calibrated on",
    **chain.COLUMNS,
    "size_mib": "size of the weights, MiB (lower is better)",
    "ms_per_token": "simulated forward pass, ms a token (lower is better)",
    "context_tokens": "tokens whose keys and values fit 1 GiB (higher is better)",
    **sweep.COLUMNS,
}
# Where sweeps begin.
RATE, SCRATCH_RATE = 2e-5, 3e-3
HELD_OUT_TOKENS = 2048
MAX_LENGTH = 128
GRID = {"group_size": 64, "symmetric": False}
PATTERN = Pattern(kept=2, group=4)
CURVE = {"a quarter of the text": 0.25, "half of the text": 0.5, "twice the text": 2.0}
CURVES = {"gptq": list(CURVE), "awq": list(CURVE)[:2], "int8_static": list(CURVE)[:2]}
# Features of a block's two norms that are scaled up, and how far: they carry magnitudes of some hundreds then.
OUTLIERS, FACTOR = 4, 60.0
# LLM.int8()'s Table 1, as recipes would say it.
TABLE_1 = {
    "absmax": {"scheme": "absmax", "granularity": "tensor", "decompose": False},
    "zeropoint": {"scheme": "zeropoint", "granularity": "tensor", "decompose": False},
    "absmax row-wise": {"scheme": "absmax", "granularity": "row", "decompose": False},
    "absmax vector-wise": {"scheme": "absmax", "granularity": "vector", "decompose": False},
    "zeropoint vector-wise": {"scheme": "zeropoint", "granularity": "vector", "decompose": False},
    "absmax row-wise + decomposition": {"scheme": "absmax", "granularity": "row", "decompose": True},
    "absmax vector-wise + decomposition": {"scheme": "absmax", "granularity": "vector", "decompose": True},
    "zeropoint vector-wise + decomposition": {"scheme": "zeropoint", "granularity": "vector", "decompose": True},
}
SCRATCH = ({"name": "bitnet"}, {"name": "bitnet", "weights": "binary"})


def rows(budget: float) -> list[Row]:
    methods = {name: catalog.load("quantize", name) for name in catalog.names("quantize")}
    rates = {name: RATE if hasattr(method, "Hooks") else None for name, method in methods.items()}
    rescued = {"method": _table("int8_static"), "exceptions": {"*.mlp.down_proj": {"name": "int8_dynamic"}}}
    finetuned = {"finetune": True, "learning_rate": RATE}
    on_target: dict[str, dict[str, Any]] = {
        BASELINE: {},
        **{name: {"method": _table(name), "learning_rate": rate} for name, rate in rates.items()},
        **{f"{name}, symmetric": {"method": {**_table(name), "symmetric": True}} for name in ("rtn", "gptq", "awq")},
        **{f"2:4, then {name}": {"prune": {"name": "sparsegpt"}, "method": _table(name)} for name in ("rtn", "gptq")},
        **{
            f"{name}, {heading}": {"method": _table(name), "text": CURVE[heading]}
            for name, headings in CURVES.items()
            for heading in headings
        },
        "int8_static, down_proj dynamic": rescued,
        "finetuned": finetuned,
        "finetuned, then rtn": {**finetuned, "method": _table("rtn")},
    }
    outliers: dict[str, Any] = {heading: {"method": {"name": "llm_int8", **of}} for heading, of in TABLE_1.items()}
    scratch = {"float": {"finetune": True}} | {", ".join(table.values()): {"method": table} for table in SCRATCH}
    few, many = ({"num_tokens": int(number * budget)} for number in (1024, 16384))
    return [
        *(Row(name, {"model": "target", **few, **settings}) for name, settings in on_target.items()),
        *(
            Row(f"outliers, {name}", {"model": "outliers", **few, **settings})
            for name, settings in {"float": {}, **outliers}.items()
        ),
        *(
            Row(f"scratch, {name}", {"model": "scratch", **many, "learning_rate": SCRATCH_RATE, **settings})
            for name, settings in scratch.items()
        ),
    ]


def tune(bench: Bench, row: Row, seed: int) -> float:
    quantized, _ = _quantize(bench, row.settings, seed)
    return nats_per_token(score(quantized.model, _held_out(bench, seed), max_length=MAX_LENGTH))


def measure(bench: Bench, row: Row, seed: int) -> dict[str, float]:
    held_out = _held_out(bench, seed)
    quantized, num_calibrated = _quantize(bench, row.settings, seed)
    invariants.require(quantized.model)
    started = time.perf_counter()
    scores = score(quantized.model, held_out, max_length=MAX_LENGTH)
    seconds = time.perf_counter() - started
    like = dict.fromkeys(likeness.COLUMNS, math.nan)
    if row.settings["model"] != "scratch":  # which has learnt nothing from the target
        like = likeness.measure_likeness(bench, quantized.model, held_out)
    config = quantized.model.config
    # Two bytes for each key and each value, unless the method says otherwise.
    width = 4 * len(blocks(quantized.model)) * config.num_key_value_heads * head_dim(config)
    return {
        "perplexity": perplexity(scores),
        **like,
        "calibrated_tokens": float(num_calibrated) or math.nan,
        "promised": chain.num_promised(config),
        "size_mib": quantized.num_bytes / 2**20,
        "ms_per_token": 1000 * seconds / sum(map(len, held_out)),
        "context_tokens": 2**30 / quantized.figures.get("kv_bytes_per_token", width),
        "rate": sweep.rate_of(row),
    }


def plant(model: PreTrainedModel, rng: torch.Generator) -> None:
    """Scale features of all norms up in place, and the weights that read them down: in floats nothing changes."""
    features = torch.randperm(model.config.hidden_size, generator=rng)[:OUTLIERS]
    block: Any  # torch types what a module holds as tensor or module
    with torch.no_grad():
        for block in blocks(model):
            attention, mlp = block.self_attn, block.mlp
            for norm, readers in (
                (block.input_layernorm, (attention.q_proj, attention.k_proj, attention.v_proj)),
                (block.post_attention_layernorm, (mlp.gate_proj, mlp.up_proj)),
            ):
                # Wherever the norm is small the factor grows, so that every planted feature stands out.
                factor = FACTOR / norm.weight[features].abs().clamp(min=1e-3)
                norm.weight[features] *= factor
                for reader in readers:
                    reader.weight[:, features] /= factor


def _table(name: str) -> dict[str, Any]:
    params = catalog.load("quantize", name).Params
    return {"name": name, **{key: value for key, value in GRID.items() if key in params.model_fields}}


def _held_out(bench: Bench, seed: int) -> list[list[int]]:
    return draw(bench.held_out, max(MAX_LENGTH, round(HELD_OUT_TOKENS * bench.budget)), MAX_LENGTH, seed)


def _quantize(bench: Bench, settings: dict[str, Any], seed: int) -> tuple[Quantized, int]:
    """Make what a row says; returns how many tokens it was calibrated on too."""

    def text() -> list[list[int]]:
        """Draw documents of all domains together, each as likely as any other."""
        of_all = [one for domain in sorted(bench.train) for one in bench.train[domain]]
        pool = [document[:MAX_LENGTH] for document in of_all if len(document) > 1]
        return up_to(Random(seed).sample(pool, len(pool)), settings["num_tokens"])

    model = _model(settings["model"], bench, seed)
    num_tokens = max(BLOCK, round(enough_tokens(model) * bench.budget * settings.get("text", 1.0)))
    calibration = draw(bench.train, num_tokens, MAX_LENGTH, seed) if _reads_text(settings) else []
    rate = {"learning_rate": settings["learning_rate"]} if settings.get("learning_rate") is not None else {}
    loop = TrainingParams(batch_tokens=512, max_length=MAX_LENGTH, **rate)
    if "prune" in settings:
        prune_model(model, calibration, catalog.parse("prune", settings["prune"]), PATTERN)
    if settings.get("finetune"):
        training.train(model, text(), loop, seed=seed)
    if "method" not in settings:
        return quantize.assemble(model, {}), 0
    params, excepted = catalog.parse("quantize", settings["method"]), settings.get("exceptions", {})
    exceptions = {pattern: catalog.parse("quantize", table) for pattern, table in excepted.items()}
    quantize.train_for(params, model, text(), loop, seed)
    return mixed.quantize(model, calibration, params, exceptions), sum(map(len, calibration))


def _reads_text(settings: dict[str, Any]) -> bool:
    quantized = [settings.get("method"), *settings.get("exceptions", {}).values()]
    named = [("prune", settings.get("prune")), *(("quantize", table) for table in quantized)]
    return any(table and catalog.load(family, table["name"]).CALIBRATED for family, table in named)


def _model(kind: str, bench: Bench, seed: int) -> PreTrainedModel:
    if kind == "scratch":
        vocab_size = target_config(bench.target_dir).vocab_size
        return evidence.small_llama(vocab_size, 128, 3, (4, 2), seed, bench.device, intermediate_size=384)
    model = load_model(bench.target_dir, device=bench.device)
    if kind == "outliers":
        plant(model, torch.Generator().manual_seed(seed))
    return model
