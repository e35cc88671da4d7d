"""The columns that all tables of changed targets share: what a draft feels of the change."""

import math

import torch
from transformers import PreTrainedModel

from models.core.checkpoints.loading import load_model
from models.core.drafting.draft_families import family_of
from models.core.evaluation.likeness import accepted, fits, likeness
from models.core.evaluation.spread import Mean
from tasks.measure.comparisons import Bench

COLUMNS = {
    "kl": "KL from the target (nats/token, lower is better)",
    "agreement_pct": "same likeliest token as the target (%, higher is better)",
    "tau": "τ of the champion draft as it is, on the row's own answers (higher is better)",
}
NUM_PROMPTS, PROMPT_LENGTH, ANSWER_LENGTH = 8, 24, 48


@torch.no_grad()
def measure_likeness(bench: Bench, model: PreTrainedModel, held_out: list[list[int]]) -> dict[str, float]:
    """Return `COLUMNS` of a changed target on documents, of which the first that are long enough begin its answers.

    NaN where its shape has none; the bench's draft is asked if it has one.
    """
    target = load_model(bench.target_dir, device=bench.device)
    found = dict.fromkeys(COLUMNS, math.nan)
    if model.config.vocab_size == target.config.vocab_size:
        like = likeness(model, target, held_out)
        weights = [float(one.num_tokens) for one in like]
        found["kl"] = Mean([one.kl for one in like], weights)
        found["agreement_pct"] = Mean([100 * one.agreement for one in like], weights)
    prompts = [document[:PROMPT_LENGTH] for document in held_out if len(document) >= PROMPT_LENGTH][:NUM_PROMPTS]
    if bench.draft_dir is not None and prompts and fits(model, target):
        draft = family_of(bench.draft_dir).load(bench.draft_dir, bench.target_dir)
        work_dir = bench.work_dir / "answers"
        scores = accepted(draft, model, prompts, bench.num_draft_tokens, ANSWER_LENGTH, work_dir)
        found["tau"] = Mean([1 + one.accepted / one.steps for one in scores], [float(one.steps) for one in scores])
    return found
