"""Measure what a draft would have accepted, without an engine."""

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import Field

from infra.artifacts import Artifact, open_artifact
from infra.settings import load_settings
from models.core.drafting.draft_families import family_of, open_draft
from models.core.evaluation.acceptance import estimate, resample_sums
from models.core.evaluation.golden import load_golden
from models.core.evaluation.paired import Score
from models.core.evaluation.scoring import STANDARD, score
from models.core.learning.hidden import Sample
from models.drafts import Draft
from models.engines import Rules
from models.recipe import Recipe
from models.types import MIN_COMPLETION, DomainEvidence, Estimate, Frozen, GateReport
from tasks.stages import cached_step, json_sha256, table, task
from tasks.stages.samples import by_domain, captures_of, read_samples, tell_captured
from tasks.stages.throttle import throttled

NUM_RESAMPLES = 2000
FILE = "scores.json"


class Measured(Frozen):
    """A draft's τ on answers that it was not trained on.

    Attributes:
        tau: domain to τ with a 95% interval that resamples conversations.
        golden_tau: τ on the golden prompts, which a service measures again after it loaded the draft.
        num_conversations: domain to how many were scored.
        coverage: domain to the share of the answers' tokens that the draft's vocabulary has.
    """

    tau: dict[str, Estimate]
    golden_tau: float
    num_conversations: dict[str, int]
    coverage: dict[str, float] = Field(default_factory=dict)

    def metrics(self) -> dict[str, float]:
        """Return the figures for MLflow."""
        found = {f"tau/{domain}": tau.value for domain, tau in self.tau.items()}
        found |= {f"coverage/{domain}": share for domain, share in self.coverage.items()}
        return found | {"golden_tau": self.golden_tau}

    def rows(self) -> list[dict[str, object]]:
        """Return the figures as a table."""
        return [
            {
                "domain": domain,
                "τ": round(tau.value, 3),
                "low": round(tau.low, 3),
                "high": round(tau.high, 3),
                "vocabulary": f"{self.coverage[domain]:.1%}" if domain in self.coverage else "",
                "conversations": self.num_conversations[domain],
            }
            for domain, tau in self.tau.items()
        ]


class Scorer:
    """Scores drafts of one target by the recipe's rules; what was scored before is not scored again.

    Where rows are `held`, so that an erasure waits, drafts share a work folder, and hidden states that the service
    captured need not be computed.
    """

    def __init__(self, recipe: Recipe, target: Artifact, device: str, held: bool = False) -> None:
        self.recipe, self.target, self.device, self.held = recipe, target, device, held
        self.target_dir, self.num, self.rules = open_artifact(target), recipe.num_draft_tokens, recipe.engine.rules

    def scores(self, drafts: Mapping[str, Artifact], samples: Sequence[Sample]) -> dict[str, list[Score]]:
        """Return each draft's scores."""
        if not samples:
            return {name: [] for name in drafts}
        sha256 = json_sha256([list(sample) for sample in samples])
        shared = load_settings().local_artifacts / "work" / f"scores-{sha256[:16]}"

        def scored(opened: Draft, own: Path) -> list[object]:
            work, captured = (shared, captures_of(self.target_dir)) if self.held else (own, None)
            found = score(opened, self.target_dir, samples, self.num, work, self.device, self.rules, captured)
            if captured is not None:
                tell_captured(captured, "score")
            return [one.model_dump() for one in found]

        rows = {name: self._produce("scores", files, scored, sha256) for name, files in drafts.items()}
        shutil.rmtree(shared, ignore_errors=True)  # it holds hidden states, which are large and count as text
        return {name: [Score.model_validate(row) for row in of_draft] for name, of_draft in rows.items()}

    def golden_tau(self, draft: Artifact) -> float:
        """Return τ on the golden prompts."""

        def measured(opened: Draft, work: Path) -> float:
            return measure_golden(opened, self.target_dir, self.num, work, self.rules, self.device)

        return float(self._produce("golden_tau", draft, measured))

    def _produce(self, stage: str, draft: Artifact, measure: Callable[[Draft, Path], Any], samples: str = "") -> Any:
        """Return what `measure` says of a draft, as JSON keeps it."""

        def make(directory: Path, work: Path) -> None:
            found = measure(open_draft(open_artifact(draft), self.target_dir), work)
            (directory / FILE).write_text(json.dumps(found))

        params, inputs = scored_by(self.recipe) | {"samples": samples}, {"target": self.target, "draft": draft}
        code = (score, family_of(open_artifact(draft)))
        made = cached_step(stage, "scores", params, throttled(make, self.device), inputs, code)
        return json.loads((open_artifact(made) / FILE).read_text())


@task
def measure_draft(recipe: Recipe, target: Artifact, draft: Artifact, samples: Artifact) -> Measured:
    """Score a draft on the held-out samples, and on the golden prompts of a target that has them."""
    scorer = Scorer(recipe, target, load_settings().device)
    scores = scorer.scores({"draft": draft}, read_samples(samples, "held_out"))["draft"]
    measured = summarise(scores, scorer.golden_tau(draft), recipe.seed)
    table("tau", measured.rows(), "τ on held-out conversations")
    return measured


def scored_by(recipe: Recipe) -> dict[str, object]:
    """Return what scores of a draft depend on besides the draft and what it is scored on."""
    greedy, sampling, draws = recipe.engine.rules
    rules = {"greedy": greedy.model_dump(), "sampling": sampling.model_dump(), "draws": draws}
    return {"num_draft_tokens": recipe.num_draft_tokens, "rules": rules}


def measure_golden(
    draft: Draft, target_dir: Path, num_draft_tokens: int, work: Path, rules: Rules = STANDARD, device: str = ""
) -> float:
    """Return τ on the target's golden prompts; the device is REDRAFT_DEVICE unless one is named."""
    golden = [(list(one.prompt_ids), list(one.token_ids)) for one in load_golden(target_dir)[0]]
    samples = [Sample(f"golden-{index}", "golden", *ids) for index, ids in enumerate(golden)]
    device = device or load_settings().device
    return tau_of(score(draft, target_dir, samples, num_draft_tokens, work, device, rules))


def tau_of(scores: Sequence[Score]) -> float:
    """Return 1 + accepted / steps over all conversations; ValueError if there are none."""
    if not scores:
        raise ValueError(f"there is nothing to score: no answer has {MIN_COMPLETION} tokens")
    return 1 + sum(score.accepted for score in scores) / sum(score.steps for score in scores)


def summarise(scores: Sequence[Score], golden_tau: float, seed: int) -> Measured:
    """Sum scores up by domain."""
    of = dict(sorted(by_domain(scores).items()))
    return Measured(
        tau={domain: _estimate(found, seed) for domain, found in of.items()},
        golden_tau=golden_tau,
        num_conversations={domain: len(found) for domain, found in of.items()},
        coverage={
            domain: sum(score.covered for score in scores) / num_tokens
            for domain, scores in of.items()
            if (num_tokens := sum(score.tokens for score in scores))
        },
    )


def first_report(measured: Measured, num_draft_tokens: int) -> GateReport:
    """Report on a draft that was trained from nothing, so that there was no champion to compare it with."""
    counts, coverage = measured.num_conversations, measured.coverage
    domains = {
        name: DomainEvidence(num_conversations=counts[name], tau_after=tau.value, coverage=coverage.get(name))
        for name, tau in measured.tau.items()
    }
    return GateReport(verdict=None, reasons=(), num_draft_tokens=num_draft_tokens, domains=domains, test=None)


def _estimate(scores: Sequence[Score], seed: int) -> Estimate:
    rows = np.array([(score.accepted, score.steps) for score in scores], dtype=np.float64)
    sums = resample_sums(rows, np.random.default_rng(seed), NUM_RESAMPLES)
    return estimate(np.array([tau_of(scores), *(1 + sums[:, 0] / sums[:, 1])]))
