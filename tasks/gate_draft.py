"""Hold a candidate against its parent, and against the best that each domain ever had."""

import json
from collections.abc import Collection, Sequence
from pathlib import Path

from prefect import task
from prefect.cache_policies import NO_CACHE

from infra.artifacts import Artifact, open_artifact, publish
from infra.priority import gently
from infra.settings import load_settings
from models import gate
from models.acceptance import Estimate
from models.drafts import open_draft
from models.gate import Score, Verdict
from models.hidden import Sample
from models.params import Frozen
from models.scoring import score
from tasks.lineage import Pair, ancestors, best_versions, next_test_index, open_registry
from tasks.measure_draft import Measured, measure_probe, summarise, tau_of
from tasks.recipe import Recipe
from tasks.reporting import run_logger, table
from tasks.samples import read_samples
from tasks.stages import produce

JUDGED = "judged.json"


class Judged(Frozen):
    """A verdict and what it rests on.

    Attributes:
        verdict: whether the candidate may be promoted, and why not.
        measured: the candidate's τ.
        parent_tau: domain to the parent's τ on the same conversations.
        test_index: which test of its line of drafts this was; each test is held to a smaller error.
        unjudged: new domains with too few conversations to say anything about.
    """

    verdict: Verdict
    measured: Measured
    parent_tau: dict[str, float]
    test_index: int
    unjudged: tuple[str, ...]


@task(cache_policy=NO_CACHE)
def gate_draft(recipe: Recipe, pair: Pair, candidate: Artifact, samples: Artifact) -> Judged:
    """Score the candidate, the champion and each domain's best past draft on the same held-out conversations.

    The best draft of a domain is scored again, because its old figure belongs to other conversations: held against
    that, traffic that got harder would look like a loss.
    """
    registry = open_registry()
    test_index = next_test_index(registry.versions("draft"), pair.draft.tags["line"])
    best = {
        domain: version
        for domain, version in best_versions(ancestors(registry, pair.draft)).items()
        if version.number != pair.draft.number
    }
    past = {
        version.number: publish(registry.download(version, load_settings().cache), "draft") for version in best.values()
    }

    def make(directory: Path, work: Path) -> None:
        target_dir, device = open_artifact(pair.target_files), load_settings().device
        held_out, unjudged = judgeable(
            read_samples(samples, "held_out"), json.loads(pair.draft.tags["tau"]), recipe.gate.min_conversations
        )

        def scored(draft: Artifact) -> list[Score]:
            opened = open_draft(open_artifact(draft), target_dir)
            return score(opened, target_dir, held_out, recipe.num_draft_tokens, work / "held_out", device)

        parent, after = scored(pair.draft_files), scored(candidate)
        past_scores = {number: scored(draft) for number, draft in past.items()}
        best_taus = {
            domain: tau_of([one for one in past_scores[version.number] if one.domain == domain])
            for domain, version in best.items()
        }
        probe_tau = measure_probe(
            open_draft(open_artifact(candidate), target_dir), target_dir, recipe.num_draft_tokens, work / "golden"
        )
        judged = Judged(
            verdict=gate.decide(parent, after, best_taus, recipe.gate, test_index, recipe.seed),
            measured=summarise(after, probe_tau, recipe.seed),
            parent_tau={domain: tau.value for domain, tau in summarise(parent, 1.0, recipe.seed).tau.items()},
            test_index=test_index,
            unjudged=unjudged,
        )
        (directory / JUDGED).write_text(judged.model_dump_json())

    artifact = produce(
        stage="judged",
        kind="judged",
        params={
            "gate": recipe.gate.model_dump(),
            "num_draft_tokens": recipe.num_draft_tokens,
            "test_index": test_index,
            "best": {domain: version.sha256 for domain, version in best.items()},
            "seed": recipe.seed,
        },
        inputs={
            "target": pair.target_files,
            "parent": pair.draft_files,
            "candidate": candidate,
            "samples": samples,
        },
        code=(__name__, "tasks.measure_draft", "models.scoring", "models.gate"),
        make=gently(make),
    )
    judged = Judged.model_validate_json((open_artifact(artifact) / JUDGED).read_text())
    _show(judged)
    return judged


def judgeable(
    samples: Sequence[Sample], known: Collection[str], min_conversations: int
) -> tuple[list[Sample], tuple[str, ...]]:
    """Leave out the domains that are new and too small to judge; a few stray requests must not stop every refresh.

    A domain that a champion was measured on stays in, however small: the gate then refuses.

    Returns:
        The other samples, and the domains that were left out.
    """
    sizes = {domain: sum(sample.domain == domain for sample in samples) for domain in {one.domain for one in samples}}
    small = {domain for domain, size in sizes.items() if size < min_conversations and domain not in known}
    return [sample for sample in samples if sample.domain not in small], tuple(sorted(small))


def _show(judged: Judged) -> None:
    rows = [
        {
            "domain": domain,
            "parent τ": round(judged.parent_tau[domain], 3),
            "candidate τ": round(judged.measured.tau[domain].value, 3),
            **_bounds(verdict.gain),
            "conversations": verdict.num_conversations,
        }
        for domain, verdict in judged.verdict.domains.items()
        if domain in judged.parent_tau
    ]
    overall = judged.verdict.overall
    rows.append({"domain": "all", "parent τ": "", "candidate τ": "", **_bounds(overall), "conversations": ""})
    table("gate", rows, "promoted" if judged.verdict.promote else "refused: " + "; ".join(judged.verdict.reasons))
    if judged.unjudged:
        run_logger().info("too few conversations to judge: %s", ", ".join(judged.unjudged))


def _bounds(gain: Estimate | None) -> dict[str, object]:
    return (
        {"gain": "", "at least": ""} if gain is None else {"gain": round(gain.value, 3), "at least": round(gain.low, 3)}
    )
