"""Measure what a draft would have accepted, without an engine."""

from collections.abc import Sequence
from pathlib import Path

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
from tasks.stages import cached_step
from tasks.stages.reporting import table
from tasks.stages.samples import read_samples
from tasks.stages.task import task
from tasks.stages.throttle import throttled

NUM_RESAMPLES = 2000
MEASURED = "measured.json"


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


@task
def measure_draft(recipe: Recipe, target: Artifact, draft: Artifact, samples: Artifact) -> Measured:
    """Score a draft on the held-out samples, and on the golden prompts of a target that has them."""

    def make(directory: Path, work: Path) -> None:
        target_dir = open_artifact(target)
        opened = open_draft(open_artifact(draft), target_dir)
        held_out = read_samples(samples, "held_out")
        device = load_settings().device
        rules = recipe.engine.rules
        scores = score(opened, target_dir, held_out, recipe.num_draft_tokens, work / "held_out", device, rules)
        golden_tau = measure_golden(opened, target_dir, recipe.num_draft_tokens, work / "golden", rules)
        (directory / MEASURED).write_text(summarise(scores, golden_tau, recipe.seed).model_dump_json())

    params, inputs = scored_by(recipe) | {"seed": recipe.seed}, {"target": target, "draft": draft, "samples": samples}
    code = (score, family_of(open_artifact(draft)))
    artifact = cached_step("measured", "measured", params, throttled(make), inputs, code)
    measured = Measured.model_validate_json((open_artifact(artifact) / MEASURED).read_text())
    table("tau", measured.rows(), "τ on held-out conversations")
    return measured


def scored_by(recipe: Recipe) -> dict[str, object]:
    """Return what scores of a draft depend on besides the draft and what it is scored on."""
    return {
        "num_draft_tokens": recipe.num_draft_tokens,
        "rules": [rule.model_dump() for rule in recipe.engine.rules],
    }


def measure_golden(
    draft: Draft, target_dir: Path, num_draft_tokens: int, work: Path, rules: Rules = STANDARD, device: str = ""
) -> float:
    """Return τ on the target's golden prompts; the device is REDRAFT_DEVICE unless one is named."""
    golden, _ = load_golden(target_dir)
    samples = [
        Sample(f"golden-{index}", "golden", list(one.prompt_ids), list(one.token_ids))
        for index, one in enumerate(golden)
    ]
    device = device or load_settings().device
    return tau_of(score(draft, target_dir, samples, num_draft_tokens, work, device, rules))


def tau_of(scores: Sequence[Score]) -> float:
    """Return 1 + accepted / steps over all conversations; ValueError if there are none."""
    if not scores:
        raise ValueError(f"there is nothing to score: no answer has {MIN_COMPLETION} tokens")
    return 1 + sum(score.accepted for score in scores) / sum(score.steps for score in scores)


def summarise(scores: Sequence[Score], golden_tau: float, seed: int) -> Measured:
    """Sum scores up by domain."""
    domains = sorted({score.domain for score in scores})
    of = {domain: [score for score in scores if score.domain == domain] for domain in domains}
    return Measured(
        tau={domain: _estimate(of[domain], seed) for domain in domains},
        golden_tau=golden_tau,
        num_conversations={domain: len(of[domain]) for domain in domains},
        coverage={
            domain: sum(score.covered for score in scores) / num_tokens
            for domain, scores in of.items()
            if (num_tokens := sum(score.tokens for score in scores))
        },
    )


def first_report(measured: Measured, num_draft_tokens: int) -> GateReport:
    """Report on a draft that was trained from nothing, so that there was no champion to compare it with."""
    return GateReport(
        verdict=None,
        reasons=(),
        num_draft_tokens=num_draft_tokens,
        domains={
            domain: DomainEvidence(
                num_conversations=measured.num_conversations[domain],
                tau_after=tau.value,
                coverage=measured.coverage.get(domain),
            )
            for domain, tau in measured.tau.items()
        },
        test=None,
    )


def _estimate(scores: Sequence[Score], seed: int) -> Estimate:
    rows = np.array([(score.accepted, score.steps) for score in scores], dtype=np.float64)
    sums = resample_sums(rows, np.random.default_rng(seed), NUM_RESAMPLES)
    return estimate(np.array([tau_of(scores), *(1 + sums[:, 0] / sums[:, 1])]))
