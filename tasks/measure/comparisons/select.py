"""Equal numbers of documents, chosen by each method, and what a small model learns from them.

Of eight documents in the pool seven are of the first domain by name, while held-out text is of all domains in equal
parts. The proxy and the model that is trained in the end are the target's outer layers with its embedding (an `lm`
draft), one layer and three of them, because the whole target is too slow to be trained as often. The same model is
measured as a draft for the target: Σ min(p, q) at temperature 1 on held-out text. `acceptance_gap` asks the one-layer
draft, untrained in the first round. Documents under four tokens have no acceptance and are left out everywhere.
"""

import math
import time

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from models import catalog
from models.core.checkpoints.loading import load_model
from models.core.evaluation.perplexity import score
from models.core.evaluation.spread import Mean, nats_per_token
from models.core.learning.training import train
from models.drafts import lm
from models.params import TrainingParams
from models.select import Sources, acceptance, select
from tasks.measure import sweep
from tasks.measure.comparisons import Bench, Row, first_by_domain, shuffled

QUESTION = "Which documents of a pool teach a small model most, at an equal number of documents?"
BASELINE = "random"
COLUMNS = {
    "loss": "held-out, nats/token ↓",
    "rare_loss": "rare domains, nats/token ↓",
    "acceptance": "accepted by the target, rate ↑",
    "rare_pct": "chosen of rare domains, %",
    "tokens": "tokens chosen ↓",
    **sweep.COLUMNS,
    "select_s": "selecting, s ↓",
}
LEARNING_RATE = 2e-3  # where sweeps begin
LENGTH, SHORTEST, NUM_POOL, NUM_CHOSEN, NUM_ROUNDS, NUM_HELD_OUT = 64, 4, 96, 24, 3, 24


def rows(budget: float) -> list[Row]:
    """Return every method; `budget` scales pool and choice, 1 being 24 documents of 96."""
    shared = {"proxy_layers": 1, "model_layers": 3, "learning_rate": LEARNING_RATE}
    return [Row(name, {"method": {"name": name}, **shared}) for name in catalog.names("select")]


def tune(bench: Bench, row: Row, seed: int) -> float:
    return _loss(_teach(bench, row, seed)[1], _flat(_held_out(bench)))


def measure(bench: Bench, row: Row, seed: int) -> dict[str, float]:
    draft, model, chosen = _teach(bench, row, seed)
    held_out = _held_out(bench)
    everything = _flat(held_out)
    uncommon = _flat({domain: some for domain, some in held_out.items() if domain != min(bench.train)})
    accepted = acceptance(draft, bench.target_dir, everything, 1, bench.work_dir / "held_out") - 1
    return {
        **chosen,
        "loss": _loss(model, everything),
        "rare_loss": _loss(model, uncommon) if uncommon else math.nan,
        "acceptance": Mean(accepted.tolist()),
        "rare_pct": chosen["rare_pct"] if uncommon else math.nan,
        "rate": sweep.rate_of(row),
    }


def _teach(bench: Bench, row: Row, seed: int) -> tuple[lm.Lm, PreTrainedModel, dict[str, float]]:
    """Return a draft and the language model of its weights after a selection, and columns of what was selected."""
    rng = torch.Generator().manual_seed(seed)
    pool, rare = _pool(bench, rng)
    num_chosen = min(max(NUM_ROUNDS, round(NUM_CHOSEN * bench.budget)), len(pool))
    settings = TrainingParams(
        learning_rate=row.settings["learning_rate"], num_epochs=6, batch_tokens=256, max_length=LENGTH
    )

    def trained(num_layers: int, chosen: list[int]) -> tuple[lm.Lm, PreTrainedModel]:
        draft, model = _cut(bench, num_layers)
        if chosen:
            train(model, [pool[place] for place in chosen], settings, seed=seed)
        return draft, model

    proxy, where = row.settings["proxy_layers"], (bench.work_dir / "pool", bench.device)
    sources = Sources(
        train=lambda chosen: trained(proxy, chosen)[1],
        target=lambda: load_model(bench.target_dir, device=bench.device),
        acceptance=lambda chosen: acceptance(trained(proxy, chosen)[0], bench.target_dir, pool, 1, *where),
    )
    started = time.perf_counter()
    chosen = select(pool, num_chosen, NUM_ROUNDS, catalog.parse("select", row.settings["method"]), sources, rng)
    select_s = time.perf_counter() - started
    draft, model = trained(row.settings["model_layers"], chosen)
    found = {
        "rare_pct": 100 * (sum(place in rare for place in chosen) / num_chosen),
        "tokens": float(sum(len(pool[place]) for place in chosen)),
        "select_s": select_s,
    }
    return draft, model, found


def _held_out(bench: Bench) -> dict[str, list[list[int]]]:
    return first_by_domain(bench.held_out, NUM_HELD_OUT, LENGTH, SHORTEST)


def _flat(documents: dict[str, list[list[int]]]) -> list[list[int]]:
    return [document for of_domain in documents.values() for document in of_domain]


def _pool(bench: Bench, rng: torch.Generator) -> tuple[list[list[int]], set[int]]:
    """Return documents in a random order, and the places of those that are not of the first domain."""
    size = max(NUM_ROUNDS, round(NUM_POOL * bench.budget))
    common, *others = sorted(bench.train)
    per_rare = size // 8 // len(others) if others else 0
    numbers = {common: size - per_rare * len(others), **dict.fromkeys(others, per_rare)}
    drawn = [
        (document, domain) for domain, number in numbers.items() for document in _draw(bench.train[domain], number, rng)
    ]
    drawn = shuffled(drawn, rng)
    return [document for document, _ in drawn], {place for place, (_, of) in enumerate(drawn) if of != common}


def _draw(documents: list[list[int]], num_wanted: int, rng: torch.Generator) -> list[list[int]]:
    long_enough = [document[:LENGTH] for document in documents if len(document) >= SHORTEST]
    return shuffled(long_enough, rng)[:num_wanted]


def _cut(bench: Bench, num_layers: int) -> tuple[lm.Lm, PreTrainedModel]:
    draft = lm.create(lm.Params(num_layers=num_layers), bench.target_dir, np.empty(0)).to(bench.device)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(draft.config)
    model.model, model.lm_head = draft.model, draft.lm_head
    return draft, model


def _loss(model: PreTrainedModel, documents: list[list[int]]) -> Mean:
    return nats_per_token(score(model, documents, max_length=LENGTH))
