"""Hold a challenger against its champion, and against the best that each domain ever had."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from prefect import task
from prefect.cache_policies import NO_CACHE
from pydantic import Field

from infra.artifacts import Artifact, open_artifact, publish
from infra.lines import ancestors, best_versions, next_challenger
from infra.priority import gently
from infra.registry import Pair, open_registry
from infra.settings import load_settings
from infra.views import Interval
from infra.views.gate import DomainEvidence, GateReport, GateTest, Limits
from infra.windows import Window
from models import gate
from models.drafts import open_draft
from models.gate import Evidence, Floor, Verdict
from models.paired import Score
from models.params import Frozen
from models.recipe import Recipe
from models.scoring import score
from tasks.measure_draft import Measured, measure_probe, rule_modules, summarise
from tasks.stages import produce
from tasks.stages.reporting import run_logger, table
from tasks.stages.samples import probe_versions, read_samples

JUDGED = "judged.json"


class Judged(Frozen):
    """A verdict and what it rests on.

    Attributes:
        verdict: what becomes of the challenger, and why.
        measured: the challenger's τ.
        parent_tau: domain to the champion's τ on the same conversations.
        unjudged: domains that a champion was measured on and that have no conversation here.
        probe_sets: domain to the version of the probe set that it was held to.
    """

    verdict: Verdict
    measured: Measured
    parent_tau: dict[str, float]
    unjudged: tuple[str, ...]
    probe_sets: dict[str, str] = Field(default_factory=dict)


@task(cache_policy=NO_CACHE)
def gate_draft(
    recipe: Recipe,
    pair: Pair,
    candidate: Artifact,
    samples: Artifact,
    evidence: Evidence | None = None,
    shares: Mapping[str, float] | None = None,
) -> Judged:
    """Score the challenger, the champion and each domain's best past draft on the same held-out conversations.

    All are scored offline at the recipe's K, the largest that is served, by the head alone: what look-up drafts or a
    step's own K has no part in it. The best draft of a domain is scored again, because its old figure belongs to other
    conversations: held against that, traffic that got harder would look like a loss.

    Args:
        recipe: what the challenger is held to.
        pair: target and champion.
        candidate: the challenger.
        samples: of kind "samples"; of its held-out part neither draft has seen anything.
        evidence: of the challenger's windows before this one; None starts the champion's next challenger.
        shares: domain to its share of current traffic; None if the held-out part is a fair sample of it.
    """
    registry = open_registry()
    if evidence is None:
        number = next_challenger(registry.versions("draft"), pair.draft.number)
        evidence = Evidence.start(recipe.num_draft_tokens, number)
    before = evidence
    best = best_versions(ancestors(registry, pair.draft))
    past = {
        version.number: publish(registry.download(version, load_settings().cache), "draft")
        for version in best.values()
        if version.number != pair.draft.number
    }

    def make(directory: Path, work: Path) -> None:
        target_dir, device = open_artifact(pair.target_files), load_settings().device
        probes = read_samples(samples, "probe")
        held_out = read_samples(samples, "held_out") + probes

        def scored(draft: Artifact) -> list[Score]:
            opened = open_draft(open_artifact(draft), target_dir)
            return score(
                opened, target_dir, held_out, recipe.num_draft_tokens, work / "held_out", device, recipe.engine.rules
            )

        champion, challenger = scored(pair.draft_files), scored(candidate)
        past_scores = {number: scored(draft) for number, draft in past.items()} | {pair.draft.number: champion}
        probe_tau = measure_probe(
            open_draft(open_artifact(candidate), target_dir),
            target_dir,
            recipe.num_draft_tokens,
            work / "golden",
            recipe.engine.rules,
        )
        measured = summarise(challenger, probe_tau, recipe.seed)
        references = {domain: past_scores[best.get(domain, pair.draft).number] for domain in measured.num_conversations}
        floors = judge_floors(references, challenger, recipe.gate, recipe.seed)
        judged = Judged(
            verdict=gate.decide(before.after(champion, challenger, shares), floors, recipe.gate),
            measured=measured,
            parent_tau={domain: tau.value for domain, tau in summarise(champion, 1.0, recipe.seed).tau.items()},
            unjudged=tuple(sorted(pair.draft.lineage.tau.keys() - floors.keys())),
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
            "evidence": before.model_dump(mode="json"),
            "shares": None if shares is None else dict(shares),
            "best": {domain: version.sha256 for domain, version in best.items()},
            "seed": recipe.seed,
        },
        inputs={
            "target": pair.target_files,
            "parent": pair.draft_files,
            "candidate": candidate,
            "samples": samples,
        },
        code=(
            __name__,
            "tasks.measure_draft",
            "models.scoring",
            "models.gate",
            "models.paired",
            "models.betting",
            *rule_modules(recipe),
        ),
        make=gently(make),
    )
    judged = Judged.model_validate_json((open_artifact(artifact) / JUDGED).read_text())
    _show(judged)
    return judged


def judge_floors(
    best: Mapping[str, Sequence[Score]], challenger: Sequence[Score], params: gate.Params, seed: int
) -> dict[str, Floor]:
    """Return domain to what the challenger pays there.

    Args:
        best: domain to the scores of its best past draft, of other domains too. A domain that it has no score of is
            not judged.
        challenger: its scores of the same conversations.
        params: what it is held to.
        seed: of the resampling.
    """
    floors = {}
    for domain, scores in sorted(best.items()):
        before, after = ([one for one in of_all if one.domain == domain] for of_all in (scores, challenger))
        if before:
            floors[domain] = gate.judge_floor(before, after, params, seed)
    return floors


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
    evidence = verdict.evidence
    return GateReport(
        verdict=verdict.outcome,
        reasons=verdict.reasons,
        num_draft_tokens=num_draft_tokens,
        domains={
            domain: DomainEvidence(
                num_conversations=floor.num_conversations,
                tau_before=judged.parent_tau.get(domain),
                tau_after=after[domain].value if domain in after else None,
                reference=floor.best,
                change=Interval.of(floor.relative),
                refusals=tuple(gate.refusals(domain, floor, params)),
                binding=floor.binding,
            )
            for domain, floor in verdict.floors.items()
        },
        test=GateTest(
            parent=parent,
            rows=None if window is None else (window.first_seq, window.last_seq),
            gain=Interval.of(verdict.gain),
            last=None if evidence.last is None else Interval.of(evidence.last),
            num_windows=evidence.num_windows,
            num_conversations=evidence.num_conversations,
            num_clusters=evidence.num_clusters,
            alpha=verdict.alpha,
            test_index=evidence.challenger,
            params=Limits.model_validate(params.model_dump()),
            left_out=judged.unjudged,
        ),
    )


def _show(judged: Judged) -> None:
    verdict = judged.verdict
    rows = [
        {
            "domain": domain,
            "champion τ": round(judged.parent_tau[domain], 3) if domain in judged.parent_tau else "",
            "challenger τ": round(floor.tau, 3),
            "best τ": round(floor.best, 3),
            "change": f"{floor.relative.value:+.1%}",
            "at least": f"{floor.relative.low:+.1%}",
            "conversations": floor.num_conversations,
        }
        for domain, floor in verdict.floors.items()
    ]
    gain = f"gain {verdict.gain.value:+.3f} tokens a step, at least {verdict.gain.low:+.3f}"
    table("gate", rows, "; ".join([verdict.outcome, gain, *verdict.reasons]))
    if judged.unjudged:
        run_logger().info("no conversation to judge: %s", ", ".join(judged.unjudged))
