"""How one draft decodes in one way, beside plain decoding: what tables of trees and of length policies share.

Every row drafts with the same draft for the same target, and answers the same prompts greedily, the beginnings of
held-out documents that the seed draws. The draft is the champion where there is one that can grow trees, else an
EAGLE-3 head of one layer that learns from answers to the training part.

Prompt by prompt, plain decoding and the row take turns on one copy of the weights, in an order that is turned round
each time; what both take counts from an answer's first token to its last. It is computed in float32, so that an output
that is another can only be a near tie or a fault: where one is a fault the row has no speed. How fast a way is in the
arithmetic that is served, `redraft bench specbench` tells.
"""

import asyncio
import math
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

import torch

from models import catalog
from models.core.drafting.draft_families import open_draft
from models.core.evaluation.golden import LEAST_THRESHOLD, equal_output
from models.core.evaluation.spread import Mean
from models.core.layers.decoder import Decoder
from models.core.learning import fitted
from models.drafts import Draft
from models.engines import Completion, Sampling
from models.engines.torch import Params, TorchEngine
from models.engines.torch.request import Took
from tasks.measure import lesson
from tasks.measure.comparisons import Bench, Row

COLUMNS = {
    "tau": "τ, tokens a step ↑",
    "rows": "rows of the target a step",
    "passes": "passes of the draft a step",
    "draft_ms": "drafting, ms a step ↓",
    "target_ms": "the target's pass and the rule, ms a step ↓",
    "speedup": "tokens/s, × plain decoding ↑",
    "equal_pct": "outputs equal to plain decoding's, %",
    "near_tie_pct": "outputs that part from it at a near tie, %",
}
NUM_PROMPTS, ANSWER_LENGTH, WARM_TOKENS, NUM_FITTED = 6, 32, 8, 48
GREEDY = Sampling(max_tokens=ANSWER_LENGTH, ignore_eos=True, num_logprobs=2)


class Answer(NamedTuple):
    """An answer, and what each of its steps took."""

    completion: Completion
    steps: list[Took]

    @property
    def decode_s(self) -> float:
        """Seconds from the first token to the last."""
        return self.completion.per_token_ms * (len(self.completion.token_ids) - 1) / 1000


def measure(bench: Bench, row: Row, seed: int) -> dict[str, float]:
    """Answer in a row's way, the `engine` of its settings, and plainly, in turn; returns all of `COLUMNS`.

    A budget of 1 is 6 answers of 32 tokens; it scales what the draft learns, too.
    """
    draft, directory = _draft(bench, seed)
    engine = _fitted(row.settings["engine"], draft, directory, bench, seed)
    prompts = lesson.opening(bench.held_out, max(2, round(NUM_PROMPTS * bench.budget)), seed)
    decoder = Decoder.load(bench.target_dir, torch.float32, bench.device)
    draft = deepcopy(draft).to(decoder.device).pack(decoder.dtype)  # all rows of a seed share the one that learnt
    plain, drafting = (
        TorchEngine(decoder, bench.target_dir, loaded, None, _params(keys))
        for loaded, keys in ((None, {"num_draft_tokens": 0}), (draft, engine))
    )
    for side in (plain, drafting):
        answer(side, prompts[0][:WARM_TOKENS], GREEDY.model_copy(update={"max_tokens": WARM_TOKENS}))
    pairs = []
    for number, prompt in enumerate(prompts):
        sides = (plain, drafting)[:: 1 - 2 * (number % 2)]
        found = [answer(side, prompt) for side in sides]
        pairs.append((found[0], found[1]) if sides[0] is plain else (found[1], found[0]))
    return figures(pairs)


def answer(engine: TorchEngine, prompt: list[int], sampling: Sampling = GREEDY) -> Answer:
    steps: list[Took] = []
    engine.on_step = steps.append
    return Answer(asyncio.run(engine.generate(prompt, sampling, "prompt")), steps)


def figures(pairs: Sequence[tuple[Answer, Answer]]) -> dict[str, float]:
    """Sum up pairs of plain decoding's answer and that of the way; see `COLUMNS`."""
    verdicts = [equal_output(plain.completion, one.completion.token_ids, LEAST_THRESHOLD) for plain, one in pairs]
    answers = [one for _, one in pairs]
    weights = [float(len(one.steps)) for one in answers]

    def a_step(name: str, unit: float = 1.0) -> Mean:
        return Mean(
            [unit * sum(getattr(step, name) for step in one.steps) / len(one.steps) for one in answers], weights
        )

    seconds = [one.decode_s for one in answers]
    ratios = [plain.decode_s / one for (plain, _), one in zip(pairs, seconds, strict=True)]
    return {
        "tau": Mean([1 + sum(one.completion.accepted) / len(one.steps) for one in answers], weights),
        "rows": a_step("num_rows"),
        "passes": a_step("num_passes"),
        "draft_ms": a_step("draft_s", 1000),
        "target_ms": a_step("target_s", 1000),
        "speedup": math.nan if "different" in verdicts else Mean(ratios, seconds),
        "equal_pct": Mean([100.0 * (verdict == "equal") for verdict in verdicts]),
        "near_tie_pct": Mean([100.0 * (verdict == "near-tie") for verdict in verdicts]),
    }


def _params(keys: dict[str, Any]) -> Params:
    max_model_len = lesson.PROMPT_LENGTH + ANSWER_LENGTH
    return Params.model_validate({"dtype": "float32", "max_model_len": max_model_len, **keys})


def _fitted(engine: dict[str, Any], draft: Draft, directory: Path | None, bench: Bench, seed: int) -> dict[str, Any]:
    """Return the keys with a length policy that has learnt of the draft, if it is one that learns.

    A champion's directory keeps one. Else it learns from answers of which another seed draws the prompts, so that a
    draft that was taught knows few of them.
    """
    lengths = _params(engine).lengths
    policy = catalog.load("lengths", lengths.name)
    if not hasattr(policy, "fit"):
        return engine
    if (kept := fitted.found("lengths", lengths, directory)) is not lengths:
        return {**engine, "lengths": kept}
    samples = lesson.answered(bench, max(2, round(NUM_FITTED * bench.budget)), seed + 1)
    k = engine["num_draft_tokens"]
    return {**engine, "lengths": policy.fit(draft, bench.target_dir, samples, k, bench.work_dir, lengths, seed)}


def _draft(bench: Bench, seed: int) -> tuple[Draft, Path | None]:
    """Return the draft of a seed, and its directory if it is the champion."""
    if bench.draft_dir is not None and (champion := open_draft(bench.draft_dir, bench.target_dir)).expands:
        return champion, bench.draft_dir
    return lesson.head(bench, seed), None
