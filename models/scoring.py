"""Would-be acceptance of a draft on answers that the target has already given.

The draft is run on the target's own tokens with its own state, as in serving, so for greedy answers the count is what
the engine would have accepted, with no engine started. Parent and candidate are scored on the same tokens; that pairing
is what lets a gate tell a small gain from noise.
"""

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from models.checkpoint import output_embedding, read_tensor
from models.distill import hidden_states, pack
from models.drafts import Draft, Rows
from models.gate import Score
from models.hidden import HiddenStates, Sample, length_buckets


def score(
    draft: Draft,
    target_dir: Path,
    samples: Sequence[Sample],
    num_draft_tokens: int,
    work_dir: Path,
    device: str = "cpu",
) -> list[Score]:
    """Score a draft conversation by conversation.

    Args:
        draft: what is scored.
        target_dir: the target that gave the answers.
        samples: prompts with answers; those of two tokens and less have no verification step to score and are left out.
        num_draft_tokens: K as served.
        work_dir: keeps the target's hidden states for the next draft.
        device: where target and draft run; the draft is moved there.

    Returns:
        a score for each sample with at least one step, in the order given. For sampled answers `accepted` is the
        expected number Σ min(p, q) along the answer, each token taken as a possible start of a block.
    """
    samples = [s for s in samples if len(s.completion_ids) > 2]
    states = hidden_states(draft, target_dir, samples, work_dir, device=device)
    draft.to(device)
    greedy = [s for s in samples if s.temperature == 0]
    sampled = [s for s in samples if s.temperature > 0]
    with torch.inference_mode():
        scores = _greedy_scores(draft, states, greedy, num_draft_tokens)
        if sampled:
            scores |= _sampled_scores(draft, target_dir, states, sampled, num_draft_tokens)
    return [scores[s.id] for s in samples]


def _greedy_scores(draft: Draft, states: HiddenStates, samples: Sequence[Sample], num_steps: int) -> dict[str, Score]:
    scores = {}
    for batch in length_buckets(samples, 2048):
        rows, _, _, lengths = pack(batch, states, num_steps, draft)
        last = lengths[rows.sequence] - 1
        matches = torch.zeros_like(rows.index)

        matched = partial(_matched, rows, last, draft.vocabulary)
        for step, (running, logits) in enumerate(draft.unroll(rows, num_steps, matched)):
            matches[running] += matched(step, running, logits)
        for number, sample in enumerate(batch):
            scores[sample.id] = _walk(sample, matches[rows.sequence == number].tolist())
    return scores


def _matched(rows: Rows, last: Tensor, vocabulary: Tensor, step: int, running: Tensor, logits: Tensor) -> Tensor:
    """[n] whether the target said the drafted token."""
    index = rows.index[running] + 2 + step
    token = rows.token_ids[rows.sequence[running], index]
    return (index <= last[running]) & (vocabulary[logits.argmax(-1)] == token)


def _inside(rows: Rows, length: int, step: int, running: Tensor, logits: Tensor) -> Tensor:
    """[n] whether the answer goes on to the next drafted token."""
    return rows.index[running] + 3 + step < length


def _walk(sample: Sample, matches: list[int]) -> Score:
    """Go through an answer as the engine would: `matches[i]` drafted tokens after answer token i are right."""
    position, steps, accepted = 0, 0, 0
    remaining = len(sample.completion_ids) - 1
    while remaining > 0:
        kept = min(matches[position], remaining) if position < len(matches) else 0
        steps, accepted = steps + 1, accepted + kept
        position, remaining = position + kept + 1, remaining - kept - 1
    return Score(id=sample.id, domain=sample.domain, steps=steps, accepted=accepted)


def _sampled_scores(
    draft: Draft, target_dir: Path, states: HiddenStates, samples: Sequence[Sample], num_steps: int
) -> dict[str, Score]:
    device = draft.vocabulary.device
    norm = read_tensor(target_dir, "model.norm.weight").float().to(device)
    eps = json.loads((target_dir / "config.json").read_text())["rms_norm_eps"]
    output = output_embedding(target_dir).to(device)
    scores = {}
    for sample in samples:
        rows, final, _, lengths = pack([sample], states, num_steps, draft)
        alive = torch.ones(len(rows.index), device=device)
        expected = torch.zeros(len(rows.index), device=device)
        inside = partial(_inside, rows, int(lengths[0]))
        for step, (running, logits) in enumerate(draft.unroll(rows, num_steps, inside)):
            states_here = final[0, rows.index[running] + 1 + step]
            normed = torch.nn.functional.rms_norm(states_here, states_here.shape[-1:], norm, eps)
            p = ((normed @ output.T) / sample.temperature).softmax(-1)[:, draft.vocabulary]
            q = (logits / sample.temperature).softmax(-1)
            alive[running] *= torch.minimum(p, q).sum(-1)
            expected[running] += alive[running]
        scores[sample.id] = Score(
            id=sample.id, domain=sample.domain, steps=len(rows.index), accepted=float(expected.sum())
        )
    return scores
