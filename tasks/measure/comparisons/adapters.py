"""The LoRA paper's table at our scale: each adapter on a new domain, with full finetuning and the untouched base.

The whole target learns the first domain by name from a few documents, and is measured on held-out ones of that domain
and of all others, which shows what it forgot. The seed draws documents, first weights and the order of batches. Each
method trains at a rate of its own: the sweep begins at the one that its file says.
Memory is what one batch keeps for the backward pass, and what weights, gradients and optimizer take; it is counted, not
read off the process.
"""

import math

import torch
from transformers import PreTrainedModel

from models import adapters, catalog
from models.core.checkpoints.loading import load_model
from models.core.evaluation.perplexity import score
from models.core.evaluation.spread import Mean, nats_per_token
from models.core.learning.counting import held_bytes
from models.core.learning.training import pad, train
from models.params import TrainingParams
from tasks.measure import likeness, sweep
from tasks.measure.comparisons import Bench, Row, shuffled

QUESTION = "What does a domain cost to learn when few parameters are trained, and what is forgotten?"
BASELINE = "base"
COLUMNS = {
    "loss": "new domain, nats/token ↓",
    "other_loss": "other domains, nats/token ↓",
    **likeness.COLUMNS,
    "trained_pct": "trained, % of base ↓",
    "saved_mib": "saved, MiB ↓",
    "held_mib": "held for backward, MiB ↓",
    "state_mib": "weights, gradients, optimizer, MiB ↓",
    **sweep.COLUMNS,
    "train_s": "training at that rate, s ↓",
}
LENGTH, BATCH_TOKENS, NUM_HELD_OUT = 96, 192, 8
FULL_LEARNING_RATE = 1e-4
_MIB = 1 << 20


def rows(budget: float) -> list[Row]:
    """Return the base, full finetuning and every method; `budget` scales the documents learnt, 1 being 16."""
    rates = {name: catalog.load("adapters", name).LEARNING_RATE for name in catalog.names("adapters")}
    return [
        Row("base", {"adapter": None, "learning_rate": None}),
        Row("full", {"adapter": None, "learning_rate": FULL_LEARNING_RATE}),
        *(Row(name, {"adapter": {"name": name}, "learning_rate": rate}) for name, rate in rates.items()),
    ]


def tune(bench: Bench, row: Row, seed: int) -> float:
    model = load_model(bench.target_dir, device=bench.device)
    _learn(bench, row, model, seed)
    return _loss(model, bench.held_out[min(bench.train)][:NUM_HELD_OUT])


def measure(bench: Bench, row: Row, seed: int) -> dict[str, float]:
    model = load_model(bench.target_dir, device=bench.device)
    costs = {"trained_pct": 0.0, "saved_mib": 0.0, **dict.fromkeys(("held_mib", "train_s"), math.nan)}
    costs["state_mib"] = model.get_memory_footprint() / _MIB
    if row.settings["learning_rate"] is not None:
        costs = _learn(bench, row, model, seed)
    new = min(bench.train)
    documents = [document[:LENGTH] for document in bench.held_out[new][:NUM_HELD_OUT]]
    rest = (domain for domain in sorted(bench.held_out) if domain != new)
    others = [document for domain in rest for document in bench.held_out[domain]][:NUM_HELD_OUT]
    return {
        "loss": _loss(model, documents),
        "other_loss": _loss(model, others) if others else math.nan,
        **likeness.measure_likeness(bench, model, documents),
        **costs,
        "rate": sweep.rate_of(row),
    }


def _learn(bench: Bench, row: Row, model: PreTrainedModel, seed: int) -> dict[str, float]:
    """Train in place on documents that the seed draws, and say what it took."""
    rng, of_weights = (torch.Generator().manual_seed(seed) for _ in range(2))
    pool = shuffled(bench.train[min(bench.train)], rng)
    documents = [document[:LENGTH] for document in pool[: max(1, round(16 * bench.budget))]]
    num_base, adapter = model.num_parameters(), row.settings["adapter"]
    adapted = None if adapter is None else adapters.attach(model, catalog.parse("adapters", adapter), of_weights)
    num_trained = model.num_parameters(only_trainable=True)
    batch = pad(documents[: BATCH_TOKENS // LENGTH])
    read, wanted = batch.token_ids.to(bench.device), batch.labels.to(bench.device)
    held = held_bytes(model, lambda: model(input_ids=read, labels=wanted, use_cache=False).loss)
    settings = TrainingParams(
        learning_rate=row.settings["learning_rate"],
        num_epochs=2,
        batch_tokens=BATCH_TOKENS,
        max_length=LENGTH,
        weight_decay=0.0,
    )
    trained, num_saved = train(model, documents, settings, seed=seed), 4 * num_trained
    if adapted:
        adapters.save(adapted, bench.work_dir)
        num_saved = sum(file.stat().st_size for file in bench.work_dir.iterdir())
    return {
        "trained_pct": 100 * num_trained / num_base,
        "saved_mib": num_saved / _MIB,
        "held_mib": held / _MIB,
        # A gradient and AdamW's two moments in float32 for each trained parameter.
        "state_mib": (model.get_memory_footprint() + 12 * num_trained) / _MIB,
        "train_s": trained.seconds,
    }


def _loss(model: PreTrainedModel, documents: list[list[int]]) -> Mean:
    return nats_per_token(score(model, [document[:LENGTH] for document in documents], max_length=LENGTH))
