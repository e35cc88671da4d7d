"""What a draft learns of a target's answers, and what it is accepted for on others: what tables of training share.

Greedy answers of the target to the beginnings of documents are learnt. Held out are answers to other documents: greedy
ones, and ones that are drawn at temperature 1. The seed draws the documents, the order of training and what is drawn.
"""

import json
import time
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from models import catalog
from models.core.checkpoints.loading import load_model
from models.core.drafting.draft_families import family_named
from models.core.evaluation.paired import Score
from models.core.evaluation.scoring import score
from models.core.evaluation.spread import Mean
from models.core.learning import distill
from models.core.learning.answering import NO_STOPS, Ask, go_on
from models.core.learning.hidden import Sample
from models.drafts import Draft
from tasks.measure import sweep
from tasks.measure.comparisons import Bench, Row, draw

COLUMNS = {
    "tau": "τ on greedy answers, tokens a step ↑",
    "tau_sampled": "τ at temperature 1, tokens a step ↑",
    "train_s": "training, s ↓",
}
NUM_DRAFT_TOKENS, MOST_TOKENS = 3, 4096
PROMPT_LENGTH, ANSWER_LENGTH, NUM_ANSWERS, NUM_HELD_OUT = 16, 48, 96, 24
TRAINING = {"num_epochs": 6, "batch_tokens": 256}
LEARNING_RATE = 1.5e-3  # where sweeps begin
HEAD = {"name": "eagle3"}


def teach(bench: Bench, row: Row, seed: int) -> tuple[Draft, dict[str, float]]:
    """Train a row's draft as `train` does, and return it with `COLUMNS` on answers to other documents, and its rate."""
    taught, train_s = train(bench, row.settings, seed)
    return taught, {**accepted(bench, taught, seed), "train_s": train_s, "rate": sweep.rate_of(row)}


def tune(bench: Bench, row: Row, seed: int) -> float:
    """Train a row's draft as `train` does, and return what a sweep makes least: minus the mean of both τ."""
    found = accepted(bench, train(bench, row.settings, seed)[0], seed)
    return -(found["tau"] + found["tau_sampled"]) / 2


def accepted(bench: Bench, draft: Draft, seed: int) -> dict[str, float]:
    """Return τ of a draft on greedy answers to held-out documents that the seed draws, and at temperature 1."""
    prompts = opening(bench.held_out, min(NUM_HELD_OUT, num_answers(bench)), seed)
    target, rng = load_model(bench.target_dir, device=bench.device), torch.Generator(bench.device).manual_seed(seed)
    held_out = [*_samples("greedy", target, prompts, None), *_samples("sampled", target, prompts, rng)]
    del target
    scores = score(draft, bench.target_dir, held_out, NUM_DRAFT_TOKENS, bench.work_dir / "held-out", bench.device)
    return {"tau": _tau(scores[: len(prompts)]), "tau_sampled": _tau(scores[len(prompts) :])}


def head(bench: Bench, seed: int) -> Draft:
    """Return a new EAGLE-3 head of one layer, trained as `train` does; kept, so one that changes it takes a copy."""
    documents = tuple(tuple(document) for domain in sorted(bench.train) for document in bench.train[domain])
    return _head(bench.target_dir, documents, bench.budget, seed, bench.device)


@lru_cache(maxsize=4)
def _head(target_dir: Path, documents: tuple[tuple[int, ...], ...], budget: float, seed: int, device: str) -> Draft:
    with TemporaryDirectory(prefix="redraft-lesson-") as folder:
        text = {"text": [list(one) for one in documents]}
        bench = Bench(target_dir, text, {}, budget, Path(folder), device=device)
        return train(bench, {"draft": HEAD, **TRAINING}, seed)[0]


def train(bench: Bench, settings: Mapping[str, Any], seed: int) -> tuple[Draft, float]:
    """Train a new draft, the table `draft` of the settings, on answers of the target by their other keys, of [distill].

    Returns it and the seconds. A budget of 1 is 96 answers of 48 tokens. A family with a vocabulary of its own gets as
    large a one as the target has, and at most 4,096 tokens.
    """
    draft, training = settings["draft"], {name: value for name, value in settings.items() if name != "draft"}
    learnt = answered(bench, num_answers(bench), seed)
    vocab_size = json.loads((bench.target_dir / "config.json").read_text())["vocab_size"]
    family = family_named(draft["name"])
    counts = np.bincount([token for one in learnt for token in one.completion_ids], minlength=vocab_size)
    own = {"vocab_size": min(MOST_TOKENS, vocab_size)} if "vocab_size" in family.Params.model_fields else {}
    model = family.create(catalog.parse("drafts", {**own, **draft}), bench.target_dir, counts)
    return model, learn(bench, model, learnt, training, seed)[1]


def learn(
    bench: Bench, draft: Draft, samples: Sequence[Sample], training: dict[str, Any], seed: int
) -> tuple[distill.Report, float]:
    """Let a draft learn in place from answers, by keys of [distill], and return the report and the seconds it took."""
    params, started = distill.Params.model_validate(training), time.perf_counter()
    work_dir, device = bench.work_dir / "train", bench.device
    report = distill.train(draft, bench.target_dir, samples, params, NUM_DRAFT_TOKENS, work_dir, seed, device=device)
    return report, time.perf_counter() - started


def answered(bench: Bench, number: int, seed: int) -> list[Sample]:
    target = load_model(bench.target_dir, device=bench.device)
    return _samples("learnt", target, opening(bench.train, number, seed), None)


def opening(documents: dict[str, list[list[int]]], number: int, seed: int) -> list[list[int]]:
    """Return the beginnings of documents that the seed draws, of one length, so that nothing is padded."""
    long_enough = {
        domain: [document for document in of_domain if len(document) >= PROMPT_LENGTH]
        for domain, of_domain in documents.items()
    }
    return draw(long_enough, number * PROMPT_LENGTH, PROMPT_LENGTH, seed)


def num_answers(bench: Bench) -> int:
    return max(2, round(NUM_ANSWERS * bench.budget))


def _samples(
    name: str, target: PreTrainedModel, prompts: Sequence[list[int]], rng: torch.Generator | None
) -> list[Sample]:
    temperature = 0.0 if rng is None else 1.0
    asks = [Ask(prompt, ANSWER_LENGTH, temperature) for prompt in prompts]
    said = go_on(target, asks, NO_STOPS, rng or torch.Generator(target.device))
    return [
        Sample(f"{name}-{place:04d}", "text", prompt, answer, temperature)
        for place, (prompt, answer) in enumerate(zip(prompts, said, strict=True))
    ]


def _tau(scores: Sequence[Score]) -> Mean:
    return Mean([1 + one.accepted / one.steps for one in scores], [float(one.steps) for one in scores])
