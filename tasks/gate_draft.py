"""Hold a candidate against its parent, and against the best that each domain ever had."""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from prefect import task
from prefect.cache_policies import NO_CACHE
from pydantic import Field

from infra.artifacts import Artifact, open_artifact, publish
from infra.lines import ancestors, best_versions, next_test_index
from infra.priority import gently
from infra.registry import Pair, Version, open_registry
from infra.settings import load_settings
from infra.views import Interval
from infra.views.gate import PASSED, REFUSED, DomainEvidence, GateReport, GateTest, Limits
from infra.windows import Window
from models import gate
from models.acceptance import Estimate
from models.drafts import open_draft
from models.gate import Score, Verdict
from models.hidden import Sample
from models.params import Frozen
from models.recipe import Recipe
from models.scoring import score
from tasks.measure_draft import Measured, measure_probe, rule_modules, summarise, tau_of
from tasks.stages import produce
from tasks.stages.reporting import run_logger, table
from tasks.stages.samples import probe_versions, read_samples

JUDGED = "judged.json"


class Judged(Frozen):
    """A verdict and what it rests on.

    Attributes:
        verdict: whether the candidate may be promoted, and why not.
        measured: the candidate's τ.
        parent_tau: domain to the parent's τ on the same conversations.
        test_index: which test of its line of drafts this was; each test is held to a smaller error.
        probe_sets: domain to the version of the probe set that it was held to.
        unjudged: domains with too few conversations to say anything about: new small ones, and known ones with none.
    """

    verdict: Verdict
    measured: Measured
    parent_tau: dict[str, float]
    test_index: int
    unjudged: tuple[str, ...]
    probe_sets: dict[str, str] = Field(default_factory=dict)


@task(cache_policy=NO_CACHE)
def gate_draft(recipe: Recipe, pair: Pair, candidate: Artifact, samples: Artifact) -> Judged:
    """Score the candidate, the champion and each domain's best past draft on the same held-out conversations.

    The best draft of a domain is scored again, because its old figure belongs to other conversations: held against
    that, traffic that got harder would look like a loss.
    """
    registry = open_registry()
    test_index = next_test_index(registry.versions("draft"), pair.draft.lineage.line)
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
        probes = read_samples(samples, "probe")
        held_out, unjudged = judgeable(
            read_samples(samples, "held_out") + probes, pair.draft.lineage.tau, recipe.gate.min_conversations
        )

        def scored(draft: Artifact) -> list[Score]:
            opened = open_draft(open_artifact(draft), target_dir)
            return score(
                opened, target_dir, held_out, recipe.num_draft_tokens, work / "held_out", device, recipe.engine.rules
            )

        parent, after = scored(pair.draft_files), scored(candidate)
        past_scores = {number: scored(draft) for number, draft in past.items()}
        probe_tau = measure_probe(
            open_draft(open_artifact(candidate), target_dir),
            target_dir,
            recipe.num_draft_tokens,
            work / "golden",
            recipe.engine.rules,
        )
        judged = Judged(
            verdict=gate.decide(parent, after, best_taus(best, past_scores), recipe.gate, test_index, recipe.seed),
            measured=summarise(after, probe_tau, recipe.seed),
            parent_tau={domain: tau.value for domain, tau in summarise(parent, 1.0, recipe.seed).tau.items()},
            test_index=test_index,
            unjudged=unjudged,
            probe_sets=probe_versions(probes),
        )
        (directory / JUDGED).write_text(judged.model_dump_json())

    artifact = produce(
        stage="judged",
        kind="judged",
        params={
            "gate": recipe.gate.model_dump(),
            "num_draft_tokens": recipe.num_draft_tokens,
            "rules": [rule.model_dump() for rule in recipe.engine.rules],
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
        code=(__name__, "tasks.measure_draft", "models.scoring", "models.gate", *rule_modules(recipe)),
        make=gently(make),
    )
    judged = Judged.model_validate_json((open_artifact(artifact) / JUDGED).read_text())
    _show(judged)
    return judged


def judgeable(
    samples: Sequence[Sample], known: Collection[str], min_conversations: int
) -> tuple[list[Sample], tuple[str, ...]]:
    """Leave out the domains that are new and too small to judge; a few stray requests must not stop every refresh.

    A domain that a champion was measured on stays in, however small: the gate then refuses. Without any sample there is
    nothing of it to judge.

    Returns:
        The other samples, and the domains that are not judged.
    """
    sizes = {domain: sum(sample.domain == domain for sample in samples) for domain in {one.domain for one in samples}}
    small = {domain for domain, size in sizes.items() if size < min_conversations and domain not in known}
    silent = set(known) - sizes.keys()
    return [sample for sample in samples if sample.domain not in small], tuple(sorted(small | silent))


def best_taus(best: Mapping[str, Version], scores: Mapping[int, Sequence[Score]]) -> dict[str, float]:
    """Return domain to the τ of the draft that was best there, on the conversations at hand.

    Args:
        best: domain to that draft's version.
        scores: version to its scores. A domain without any has no τ.
    """
    found = ((name, [one for one in scores[version.number] if one.domain == name]) for name, version in best.items())
    return {name: tau_of(of_domain) for name, of_domain in found if of_domain}


def judged_report(
    judged: Judged, params: gate.Params, parent: int, window: Window | None, num_draft_tokens: int
) -> GateReport:
    """Report on a candidate that was held against its parent.

    Args:
        judged: the verdict and what it rests on.
        params: what the candidate was held to.
        parent: the parent's version.
        window: what it was trained on; None for a draft from elsewhere.
        num_draft_tokens: K.
    """
    verdict, after = judged.verdict, judged.measured.tau
    return GateReport(
        verdict=PASSED if verdict.promote else REFUSED,
        reasons=verdict.reasons,
        num_draft_tokens=num_draft_tokens,
        domains={
            domain: DomainEvidence(
                num_conversations=found.num_conversations,
                tau_before=judged.parent_tau.get(domain),
                tau_after=after[domain].value if domain in after else None,
                reference=found.best,
                change=None if found.relative is None else Interval.of(found.relative),
                refusals=tuple(gate.refusals(domain, found, params)),
            )
            for domain, found in verdict.domains.items()
        },
        test=GateTest(
            parent=parent,
            rows=None if window is None else (window.first_seq, window.last_seq),
            gain=Interval.of(verdict.overall),
            alpha=verdict.alpha,
            test_index=judged.test_index,
            params=Limits.model_validate(params.model_dump()),
            left_out=judged.unjudged,
        ),
    )


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
