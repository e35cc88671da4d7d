"""What a draft accepts after the same steps on the same answers, under each loss.

The recipe's way to draft is not asked: every row trains a new EAGLE-3 head of one layer from one start, on greedy
answers of the target to the beginnings of documents, with one learning rate for all. It is held to answers of the
target to other documents: greedy ones, and ones that are drawn at temperature 1, where losses that aim at what is kept
should be ahead. The seed draws the documents, the order of training and what is drawn.

A loss that reads what an EAGLE-3 head has not is not here.
"""

import time
from collections.abc import Sequence

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from models import catalog, distill
from models.drafts import family_named
from models.hidden import Sample
from models.likeness import answers
from models.paired import Score
from models.scoring import score
from tasks.measure.comparisons import Bench, Row, draw
from tasks.measure.spread import Mean

QUESTION = "Which loss teaches a draft head most, at equal steps on the same answers?"
BASELINE = "forward_kl"
COLUMNS = {
    "tau": "τ on greedy answers, tokens a step ↑",
    "tau_sampled": "τ at temperature 1, tokens a step ↑",
    "train_s": "training, s ↓",
}
FAMILY, NUM_DRAFT_TOKENS, MOST_TOKENS = "eagle3", 3, 4096
PROMPT_LENGTH, ANSWER_LENGTH, NUM_ANSWERS, NUM_HELD_OUT = 16, 48, 96, 24
TRAINING = {"num_epochs": 6, "batch_tokens": 256, "follow": "all"}


def rows(budget: float) -> list[Row]:
    """Return every loss; `budget` scales the answers that are learnt, 1 being 96 of 48 tokens."""
    return [Row(name, {"loss": {"name": name}, **TRAINING}) for name in catalog.names("losses")]


def measure(bench: Bench, row: Row, seed: int) -> dict[str, float]:
    """Train one draft; see `tasks.measure.comparisons`."""
    target: PreTrainedModel = AutoModelForCausalLM.from_pretrained(bench.target_dir, dtype=torch.float32)
    rng = torch.Generator().manual_seed(seed)
    num_answers = max(2, round(NUM_ANSWERS * bench.budget))
    learnt = _samples("learnt", target, _prompts(bench.train, num_answers, seed), None)
    prompts = _prompts(bench.held_out, min(NUM_HELD_OUT, num_answers), seed)
    held_out = [*_samples("greedy", target, prompts, None), *_samples("sampled", target, prompts, rng)]
    vocab_size = target.config.vocab_size
    del target
    family = family_named(FAMILY)
    counts = np.bincount([token for one in learnt for token in one.completion_ids], minlength=vocab_size)
    settings = {"name": FAMILY, "vocab_size": min(MOST_TOKENS, vocab_size)}
    draft = family.create(catalog.parse("drafts", settings), bench.target_dir, counts)
    params = distill.Params.model_validate(row.settings)
    started = time.perf_counter()
    distill.train(draft, bench.target_dir, learnt, params, NUM_DRAFT_TOKENS, bench.work_dir / "train", seed)
    train_s = time.perf_counter() - started
    scores = score(draft, bench.target_dir, held_out, NUM_DRAFT_TOKENS, bench.work_dir / "held-out")
    greedy, sampled = scores[: len(prompts)], scores[len(prompts) :]
    return {"tau": _tau(greedy), "tau_sampled": _tau(sampled), "train_s": train_s}


def _prompts(documents: dict[str, list[list[int]]], number: int, seed: int) -> list[list[int]]:
    """Return the beginnings of documents that the seed draws, of one length, so that nothing is padded."""
    long_enough = {
        domain: [document for document in of_domain if len(document) >= PROMPT_LENGTH]
        for domain, of_domain in documents.items()
    }
    return draw(long_enough, number * PROMPT_LENGTH, PROMPT_LENGTH, seed)


def _samples(
    name: str, target: PreTrainedModel, prompts: Sequence[list[int]], rng: torch.Generator | None
) -> list[Sample]:
    said = answers(target, torch.tensor(prompts), ANSWER_LENGTH, rng)
    temperature = 0.0 if rng is None else 1.0
    return [
        Sample(f"{name}-{place:04d}", "text", prompt, answer, temperature)
        for place, (prompt, answer) in enumerate(zip(prompts, said, strict=True))
    ]


def _tau(scores: Sequence[Score]) -> Mean:
    return Mean([1 + one.accepted / one.steps for one in scores], [float(one.steps) for one in scores])
