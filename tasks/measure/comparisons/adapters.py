"""The LoRA paper's table at our scale: each adapter on a new domain, with full finetuning and the untouched base.

The whole target learns the first domain by name from a few documents, cut to `LENGTH` tokens, and is measured on
held-out ones of that domain and of all others, which shows what it forgot. The seed draws documents, first weights and
the order of batches. Each method trains at the rate its file says, at a third of it and at three times as much; what is
shown is the one that does best on documents of the domain that are neither learnt nor measured on, and its rate.
Memory is what one batch keeps for the backward pass, and what weights, gradients and optimizer take; it is counted, not
read off the process.
"""

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from models import adapters, catalog
from models.counting import held_bytes
from models.params import TrainingParams
from models.perplexity import score
from models.training import pad, train
from tasks.measure import likeness
from tasks.measure.comparisons import Bench, Row, shuffled
from tasks.measure.losses import nats_per_token
from tasks.measure.spread import Mean

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
    "rate": "learning rate, the best of three",
    "train_s": "training at that rate, s ↓",
}
LENGTH, BATCH_TOKENS, NUM_HELD_OUT = 96, 192, 8
SWEEP = (1 / 3, 1.0, 3.0)
FULL_LEARNING_RATE = 1e-4
_MIB = 1 << 20


def rows(budget: float) -> list[Row]:
    """Return the base, full finetuning and every method; `budget` scales the documents learnt, 1 being 16."""
    methods = {name: catalog.load("adapters", name).LEARNING_RATE for name in catalog.names("adapters")}
    return [
        Row("base", {"adapter": None, "learning_rate": None}),
        Row("full", {"adapter": None, "learning_rate": FULL_LEARNING_RATE}),
        *(Row(name, {"adapter": {"name": name}, "learning_rate": rate}) for name, rate in methods.items()),
    ]


def measure(bench: Bench, row: Row, seed: int) -> dict[str, float]:
    """Train as `row` says and measure; see `tasks.measure.comparisons`."""
    model = _target(bench)
    if row.settings["learning_rate"] is None:
        nothing = dict.fromkeys(("held_mib", "rate", "train_s"), float("nan"))
        costs = {"trained_pct": 0.0, "saved_mib": 0.0, **nothing, "state_mib": _num_bytes(model) / _MIB}
    else:
        model, costs = _best_of_sweep(bench, row, seed)
    documents = [document[:LENGTH] for document in bench.held_out[min(bench.train)][:NUM_HELD_OUT]]
    return {**_losses(bench, model), **likeness.measure_likeness(bench, model, documents), **costs}


def _target(bench: Bench) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(bench.target_dir, dtype=torch.float32)
    return model


def _best_of_sweep(bench: Bench, row: Row, seed: int) -> tuple[PreTrainedModel, dict[str, float]]:
    """Train at each rate; return the model with the least loss on documents of its own, and what it took."""
    pool = shuffled(bench.train[min(bench.train)], torch.Generator().manual_seed(seed))
    num_learnt = max(1, round(16 * bench.budget))
    unseen = pool[num_learnt : num_learnt + NUM_HELD_OUT] or pool[-1:]
    best: tuple[float, PreTrainedModel, dict[str, float]] | None = None
    for factor in SWEEP:
        model, rate = _target(bench), factor * row.settings["learning_rate"]
        costs = _learn(bench, row, model, [document[:LENGTH] for document in pool[:num_learnt]], rate, seed)
        loss = _loss(model, unseen)
        if best is None or loss < best[0]:
            best = loss, model, costs | {"rate": rate}
    assert best is not None
    return best[1:]


def _learn(
    bench: Bench, row: Row, model: PreTrainedModel, documents: list[list[int]], rate: float, seed: int
) -> dict[str, float]:
    """Train in place and say what it took."""
    rng = torch.Generator().manual_seed(seed)
    num_base, adapted = model.num_parameters(), None
    if row.settings["adapter"] is not None:
        adapted = adapters.attach(model, catalog.parse("adapters", row.settings["adapter"]), rng)
    num_trained = model.num_parameters(only_trainable=True)
    batch = pad(documents[: BATCH_TOKENS // LENGTH])
    held = held_bytes(model, lambda: model(input_ids=batch.token_ids, labels=batch.labels, use_cache=False).loss)
    settings = TrainingParams(
        learning_rate=rate,
        num_epochs=2,
        batch_tokens=BATCH_TOKENS,
        max_length=LENGTH,
        weight_decay=0.0,
    )
    trained = train(model, documents, settings, seed=seed)
    num_saved = 4 * num_trained
    if adapted:
        adapters.save(adapted, bench.work_dir)
        num_saved = sum(file.stat().st_size for file in bench.work_dir.iterdir())
    return {
        "trained_pct": 100 * num_trained / num_base,
        "saved_mib": num_saved / _MIB,
        "held_mib": held / _MIB,
        # A gradient and AdamW's two moments in float32 for each trained parameter.
        "state_mib": (_num_bytes(model) + 12 * num_trained) / _MIB,
        "train_s": trained.seconds,
    }


def _losses(bench: Bench, model: PreTrainedModel) -> dict[str, float]:
    new = min(bench.train)
    others = [
        document
        for domain in sorted(bench.held_out)
        if domain != new
        for document in bench.held_out[domain][:NUM_HELD_OUT]
    ]
    return {
        "loss": _loss(model, bench.held_out[new][:NUM_HELD_OUT]),
        "other_loss": _loss(model, others[:NUM_HELD_OUT]) if others else float("nan"),
    }


def _loss(model: PreTrainedModel, documents: list[list[int]]) -> Mean:
    return nats_per_token(score(model, [document[:LENGTH] for document in documents], max_length=LENGTH))


def _num_bytes(model: PreTrainedModel) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in [*model.parameters(), *model.buffers()])
