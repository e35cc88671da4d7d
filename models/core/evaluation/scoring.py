"""Would-be acceptance of a draft on answers that the target has already given.

The draft is run on the target's own tokens with its own state, as in serving, and the verification rule says how many
of its tokens it would have accepted: for greedy answers the engine's own count, with no engine started, for sampled
ones an expected number whose mean over answers is the engine's. Parent and candidate are scored on the same tokens;
that pairing is what lets a gate tell a small gain from noise.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from models import catalog
from models.core.checkpoints.readout import Readout
from models.core.evaluation.acceptance import Trace
from models.core.evaluation.paired import Score
from models.core.learning.captured import Captures
from models.core.learning.hidden import HiddenStates, Sample, hidden_states, length_buckets, pack
from models.drafts import Draft, Rows
from models.engines import Rules
from models.params import BaseParams
from models.targets import target_config
from models.types import MIN_COMPLETION
from models.verify import greedy, rejection

STANDARD = Rules(greedy.Params(), rejection.Params())
STARTS = 64  # of one sampled answer at a time: p and q hold the whole vocabulary for each of their tokens


def score(
    draft: Draft,
    target_dir: Path,
    samples: Sequence[Sample],
    num_draft_tokens: int,
    work_dir: Path,
    device: str = "cpu",
    rules: Rules = STANDARD,
    captured: Captures | None = None,
) -> list[Score]:
    """Score a draft conversation by conversation, but for answers of two tokens and less, which have no step to score.

    Of a greedy answer `steps` and `accepted` are those of serving it by the engine's rules at K; of a sampled one
    each token is taken as the start of a step. `work_dir` keeps the target's hidden states for the next draft;
    those that were `captured` need not be computed. The draft is moved to the device.
    """
    samples = [s for s in samples if len(s.completion_ids) >= MIN_COMPLETION]
    states = hidden_states(draft, target_dir, samples, work_dir, device=device, captured=captured)
    draft.to(device)
    chosen = [s for s in samples if s.temperature == 0]
    sampled = [s for s in samples if s.temperature > 0]
    with torch.inference_mode():
        scores = greedy_scores(draft, states, chosen, num_draft_tokens, rules.greedy)
        if sampled:
            scores |= _sampled_scores(draft, target_dir, states, sampled, num_draft_tokens, rules)
    return [scores[s.id] for s in samples]


def greedy_scores(
    draft: Draft, states: HiddenStates, samples: Sequence[Sample], num_steps: int, rule: BaseParams
) -> dict[str, Score]:
    """Return id to score of greedy answers whose states are there; see `score`."""
    steps = _greedy_steps(draft, states, samples, num_steps, rule)
    return {s.id: _as_score(draft, s, len(steps[s.id]), sum(steps[s.id])) for s in samples}


def trace(
    draft: Draft,
    target_dir: Path,
    samples: Sequence[Sample],
    num_draft_tokens: int,
    work_dir: Path,
    device: str = "cpu",
    rule: BaseParams = STANDARD.greedy,
) -> list[Trace]:
    """Tell step by step what serving greedy answers would draft and accept; ValueError if one was sampled."""
    samples = [s for s in samples if len(s.completion_ids) >= MIN_COMPLETION]
    if sampled := [s.id for s in samples if s.temperature > 0]:
        raise ValueError(f"answer {sampled[0]} was sampled; wanted greedy ones")
    states = hidden_states(draft, target_dir, samples, work_dir, device=device)
    with torch.inference_mode():
        steps = _greedy_steps(draft.to(device), states, samples, num_draft_tokens, rule)
    return [
        Trace(
            request_id=s.id,
            token_ids=tuple(s.completion_ids),
            drafted=(min(num_draft_tokens, draft.max_depth or num_draft_tokens),) * len(steps[s.id]),
            accepted=tuple(steps[s.id]),
            domain=s.domain,
        )
        for s in samples
    ]


def _greedy_steps(
    draft: Draft, states: HiddenStates, samples: Sequence[Sample], num_steps: int, rule: BaseParams
) -> dict[str, list[int]]:
    """Return sample id to the tokens accepted in each step of serving it."""
    steps = {}
    for batch in length_buckets(samples, 2048):
        rows, _, _, lengths = pack(batch, states, num_steps, draft)
        last = lengths[rows.sequence] - 1
        # Of the vocabulary only two kinds count: what the target said, here token 0, and all other tokens together.
        q = torch.zeros(len(rows.index), num_steps, 2, device=last.device)
        matched = partial(_matched, rows, last, draft.vocabulary)
        for step, (running, logits, *_) in enumerate(draft.unroll(rows, num_steps, matched)):
            hits = matched(step, running, logits)
            q[running, step] = torch.stack([hits, ~hits], dim=-1).to(q)
        said = torch.zeros(q.shape[:2], dtype=torch.int64, device=q.device)
        p = torch.tensor([1.0, 0.0], device=q.device).expand_as(q)
        matches = catalog.load("verify", rule.name).expected_accepted(said, q, p, rule).long()
        for number, sample in enumerate(batch):
            steps[sample.id] = _walk(len(sample.completion_ids), matches[rows.sequence == number].tolist())
    return steps


def _matched(rows: Rows, last: Tensor, vocabulary: Tensor, step: int, running: Tensor, logits: Tensor) -> Tensor:
    index = rows.index[running] + 2 + step
    token = rows.token_ids[rows.sequence[running], index]
    return (index <= last[running]) & (vocabulary[logits.argmax(-1)] == token)


def _inside(rows: Rows, length: int, step: int, running: Tensor, logits: Tensor) -> Tensor:
    return rows.index[running] + 3 + step < length


def _walk(num_tokens: int, matches: list[int]) -> list[int]:
    """Go through an answer as the engine would: `matches[i]` drafted tokens after answer token i are right."""
    position, accepted = 0, []
    while position < num_tokens - 1:
        kept = min(matches[position], num_tokens - 1 - position) if position < len(matches) else 0
        accepted.append(kept)
        position += kept + 1
    return accepted


def _as_score(draft: Draft, sample: Sample, steps: int, accepted: float) -> Score:
    same = {"id": sample.id, "domain": sample.domain, "cluster": sample.cluster, "weight": sample.weight}
    written = torch.tensor(sample.completion_ids[1:], device=draft.vocabulary.device)
    covered = int(torch.isin(written, draft.vocabulary).sum())
    return Score(**same, steps=steps, accepted=accepted, tokens=len(written), covered=covered)


def _sampled_scores(
    draft: Draft, target_dir: Path, states: HiddenStates, samples: Sequence[Sample], num_steps: int, rules: Rules
) -> dict[str, Score]:
    device, rule = draft.vocabulary.device, rules.sampling
    readout, vocab_size = Readout.load(target_dir, device), target_config(target_dir).vocab_size
    expected_accepted = catalog.load("verify", rule.name).expected_accepted
    scores = {}
    for sample in samples:
        rows, final, _, lengths = pack([sample], states, num_steps, draft)
        drafted = draft.unroll(rows, num_steps, partial(_inside, rows, int(lengths[0])))
        expected = 0.0
        for start in range(0, len(rows.index), STARTS):
            index = rows.index[start : start + STARTS]
            q = torch.zeros(len(index), num_steps, vocab_size, device=device)
            for step, (running, logits, *_) in enumerate(drafted):
                here = (running >= start) & (running < start + STARTS)
                law = (logits[here] / sample.temperature).softmax(-1)
                if not rules.draws:
                    law = one_hot(law.argmax(-1), law.shape[-1]).to(law)
                q[(running[here] - start)[:, None], step, draft.vocabulary] = law
            places = torch.arange(int(index[0]) + 1, int(index[-1]) + 1 + num_steps, device=device)
            told = final[0, places.clamp(max=final.shape[1] - 1)]  # past the answer's end nothing is drafted
            laws = (readout.logits(readout.norm(told)) / sample.temperature).softmax(-1)
            # Neighbouring starts share all tokens but one.
            p, said = (
                of_places.unfold(0, num_steps, 1).movedim(-1, 1) for of_places in (laws, rows.token_ids[0, places + 1])
            )
            expected += float(expected_accepted(said, q, p, rule).sum())
        scores[sample.id] = _as_score(draft, sample, len(rows.index), expected)
    return scores
