"""Hold a draft against the champion on what a window held out, and against each domain's best on its regression set."""

from collections.abc import Mapping, Sequence

from pydantic import Field

from infra.artifacts import Artifact, publish
from infra.registry import open_registry
from infra.regression_sets import scored_as
from infra.settings import load_settings
from infra.versions import Pair, best_versions, is_usable, predecessors
from infra.windows import Window
from models.core.evaluation.gate import Evidence, decide, score_floor
from models.core.evaluation.paired import Score
from models.recipe import Recipe
from models.types import DomainEvidence, Estimate, Frozen, GateParams, GateReport, GateTest
from tasks.claim_window import Parts
from tasks.measure_draft import Measured, Scorer, summarise, tau_of
from tasks.stages import run_logger, table, task
from tasks.stages.samples import by_domain, read_samples, regression_set_versions
from tasks.stages.throttle import device_of

CHAMPION, CANDIDATE = "champion", "candidate"


class GateResult(Frozen):
    """What became of a draft, and what it rests on.

    Attributes:
        report: verdict, reasons and figures, without where the draft came from; see `origin`.
        evidence: for the challenger's next window.
        measured: its τ on each domain's regression set and, where that is small, on what the window held out as well.
        regression_sets: domain to the version of the regression set that it was held to.
        gate_data: address of the conversations that it was gated by.
        unlike: see `Parts`.
    """

    report: GateReport
    evidence: Evidence
    measured: Measured
    regression_sets: dict[str, str] = Field(default_factory=dict)
    gate_data: str = ""
    unlike: dict[str, Estimate] = Field(default_factory=dict)

    @property
    def test(self) -> GateTest:
        """The test that it was held to."""
        assert self.report.test is not None
        return self.report.test

    def origin(
        self, parent: int, window: Window | None = None, continues: int | None = None, returns: int | None = None
    ) -> GateReport:
        """Return the report with where the draft came from; see `GateTest`."""
        rows = None if window is None else (window.first_seq, window.last_seq)
        told = {"parent": parent, "rows": rows, "continues": continues, "returns": returns}
        return self.report.model_copy(update={"test": self.test.model_copy(update=told)})


@task
def gate_draft(
    recipe: Recipe, pair: Pair, before: Evidence, candidate: Artifact, parts: Parts, learns: bool = True
) -> GateResult:
    """Gate a draft by what was held out and by what each domain pays.

    `candidate` is the challenger, a draft from elsewhere or a past one; `learns` says whether it goes on learning where
    nothing is shown.

    The best draft of a domain is scored again, because its old figure belongs to other conversations: held against
    that, traffic that got harder would look like a loss.
    """
    params, seed = recipe.gate, recipe.seed
    scorer = Scorer(recipe, pair.target_files, device_of(recipe.refresh_distill()), held=True)
    drafts = {CHAMPION: pair.draft_files, CANDIDATE: candidate}
    past = best_past(pair)
    held_out, regression = (read_samples(parts.samples, part) for part in ("held_out", "regression"))
    of_window = scorer.scores(drafts, held_out)
    of_sets = scorer.scores(drafts | {one.sha256: one for one in past.values()}, regression)
    fresh = set(parts.fresh)  # held out as well, and never looked at before
    champion, candidates = (of_window[name] + [one for one in of_sets[name] if one.id in fresh] for name in drafts)
    evidence = before.after(champion, candidates, parts.shares) if champion else before
    groups = scored_as(one.domain for one in regression)
    grouped = {
        name: [one.model_copy(update={"domain": groups[one.domain]}) for one in found]
        for name, found in of_sets.items()
    }
    of_past = [(groups.get(domain), grouped[files.sha256]) for domain, files in past.items()]
    best = {
        group: best_of(group, [grouped[CHAMPION], *(found for name, found in of_past if name == group)])
        for group in sorted({*groups.values()})
    }
    floors = score_floors(best, grouped[CANDIDATE], params, seed)
    large = {domain for domain, group in groups.items() if group == domain}
    # What a draft is measured by: its scores on the regression sets and, where a set is small, of the window.
    measured_by = ([*of_sets[name], *(one for one in of_window[name] if one.domain not in large)] for name in drafts)
    parent, measured = (summarise(scores, 1.0, seed) for scores in measured_by)
    left_out = tuple(sorted(pair.draft.lineage.tau.keys() - measured.tau.keys()))
    gated = GateResult(
        report=with_tau(decide(evidence, floors, params, learns), parent, measured, left_out),
        evidence=evidence,
        measured=measured.model_copy(update={"golden_tau": scorer.golden_tau(candidate)}),
        regression_sets=regression_set_versions(regression),
        gate_data=parts.samples.uri,
        unlike=parts.unlike,
    )
    _show(gated)
    return gated


def best_past(pair: Pair) -> dict[str, Artifact]:
    """Return domain to the draft before the champion that was best there, where that is not the champion.

    Those found bad don't count, nor do drafts that the champion neither comes from nor was gated against.
    """
    registry = open_registry()
    best = best_versions([one for one in predecessors(registry, pair.draft) if is_usable(one)])
    return {
        domain: publish(registry.download(version, load_settings().cache), "draft")
        for domain, version in best.items()
        if version.number != pair.draft.number
    }


def with_tau(report: GateReport, champion: Measured, challenger: Measured, left_out: tuple[str, ...]) -> GateReport:
    """Return a report with what both drafts were measured at, in domains without a floor too."""
    assert report.test is not None
    domains = {}
    for domain in challenger.tau | report.domains:
        found = report.domains.get(domain) or DomainEvidence(
            num_conversations=challenger.num_conversations[domain], tau_after=None
        )
        after = challenger.tau[domain].value if domain in challenger.tau else found.tau_after
        before = champion.tau[domain].value if domain in champion.tau else None
        domains[domain] = found.model_copy(
            update={"tau_before": before, "tau_after": after, "coverage": challenger.coverage.get(domain)}
        )
    test = report.test.model_copy(update={"left_out": left_out})
    return report.model_copy(update={"domains": domains, "test": test})


def best_of(domain: str, drafts: Sequence[Sequence[Score]]) -> Sequence[Score]:
    """Return the scores of the draft with the highest τ in a domain, of the same conversations; the first of equals."""
    return max(drafts, key=lambda scores: tau_of(by_domain(scores).get(domain, [])))


def score_floors(
    best: Mapping[str, Sequence[Score]], challenger: Sequence[Score], params: GateParams, seed: int
) -> dict[str, DomainEvidence]:
    """Return domain to what the challenger pays there; a domain without scores of a past draft is not gated."""
    of = by_domain(challenger)
    pairs = {domain: (by_domain(scores).get(domain), of.get(domain, [])) for domain, scores in sorted(best.items())}
    return {domain: score_floor(before, after, params, seed) for domain, (before, after) in pairs.items() if before}


def _show(gated: GateResult) -> None:
    report, evidence, gain = gated.report, gated.evidence, gated.test.gain
    rows = [
        {
            "domain": domain,
            "champion τ": _rounded(one.tau_before),
            "challenger τ": _rounded(one.tau_after),
            "best τ": _rounded(one.reference),
            "vocabulary": "" if one.coverage is None else f"{one.coverage:.1%}",
            "change": "" if one.change is None else f"{one.change.value:+.1%}",
            "at least": "" if one.change is None else f"{one.change.low:+.1%}",
            "conversations": one.num_conversations,
        }
        for domain, one in report.domains.items()
    ]
    found = f"gain {gain.value:+.3f} tokens a step, at least {gain.low:+.3f}"
    counted = f"{evidence.num_clusters} clusters held out in {evidence.num_windows} windows"
    table("gate", rows, "; ".join([str(report.verdict), found, counted, *report.reasons]))
    if gated.test.left_out:
        run_logger().info("no conversation to score: %s", ", ".join(gated.test.left_out))


def _rounded(tau: float | None) -> float | str:
    return "" if tau is None else round(tau, 3)
