"""Why a draft passed its gate or did not, for people and for programs.

Each draft's run in MLflow keeps a page (gate.md), the same as data (gate.json) and, where a gate judged, a figure
(gate.png). They are written from one object, so that they can't disagree.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal

from pydantic import ConfigDict

from infra.views import Interval, Shown
from infra.views.figures import draw_gate

Outcome = Literal["passed", "refused", "unjudged"]
PASSED: Outcome = "passed"
REFUSED: Outcome = "refused"
UNJUDGED: Outcome = "unjudged"
PAGE, DATA, FIGURE = "gate.md", "gate.json", "gate.png"
TITLES = {
    PASSED: "Gate passed",
    REFUSED: "Gate refused",
    UNJUDGED: "No gate: the first draft of its line",
}
MEANING = "τ is the mean accepted length, 1 + accepted draft tokens / verification steps"


class DomainEvidence(Shown):
    """What was found in one domain.

    Attributes:
        num_conversations: held-out conversations that both drafts were scored on.
        tau_before: the parent's τ on them; None without a parent or a conversation.
        tau_after: the draft's own τ; None without a conversation.
        reference: the larger of `tau_before` and of what the domain's best past draft has here.
        change: (τ after − reference) / reference; its `low` is held against −floor. None with too few conversations.
        refusals: why the domain stands against promotion; empty if it does not.
    """

    num_conversations: int
    tau_before: float | None
    tau_after: float | None
    reference: float | None
    change: Interval | None
    refusals: tuple[str, ...]


class Limits(Shown):
    """What a candidate was held to: those of the gate's settings that are told.

    Attributes:
        floor: share of τ that a domain may lose.
        confidence: of each domain's one-sided bound.
        num_resamples: that the bounds are from.
        min_conversations: in each domain.
        alpha_total: chance that a line of tests passes a draft without gain.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    floor: float
    confidence: float
    num_resamples: int
    min_conversations: int
    alpha_total: float


class GateTest(Shown):
    """The test over all conversations, and what it was held to.

    Attributes:
        parent: version that the candidate was compared with; also the one that it was trained from, if it was trained
            here.
        rows: first and last of the query log that it was trained on; None for a draft from elsewhere.
        gain: τ of the candidate minus τ of the parent; each end is wrong with chance `alpha`.
        test_index: which test of its line of drafts this was, from 1.
        params: floor, confidence and error budget.
        left_out: domains with too few conversations to judge: new small ones, and known ones with none.
    """

    parent: int
    rows: tuple[int, int] | None
    gain: Interval
    alpha: float
    test_index: int
    params: Limits
    left_out: tuple[str, ...]


class GateReport(Shown):
    """All that is known of why a draft may be served; `test` is None for a draft that started a line."""

    verdict: Outcome
    reasons: tuple[str, ...]
    num_draft_tokens: int
    domains: dict[str, DomainEvidence]
    test: GateTest | None


def headline(report: GateReport) -> str:
    """Return verdict and reason in one line."""
    if report.test is None:
        return f"{TITLES[UNJUDGED]}; there was no champion to compare it with."
    if report.reasons:
        more = f" (and {len(report.reasons) - 1} more)" if len(report.reasons) > 1 else ""
        return f"{TITLES[REFUSED]}: {report.reasons[0]}{more}."
    gain = report.test.gain
    return f"{TITLES[PASSED]}: τ {gain.value:+.3f} against draft {report.test.parent}, at least {gain.low:+.3f}."


def explain(report: GateReport) -> str:
    """Return in plain words what was asked and what the answer was."""
    test = report.test
    if test is None:
        return (
            "This draft was not trained from another one. There was no champion to compare it with, so no gate judged "
            "it. The figures are its own, on conversations it was not trained on."
        )
    count = sum(evidence.num_conversations for evidence in report.domains.values())
    shown = "a gain is shown" if test.gain.low > 0 else "no gain is shown"
    return " ".join(
        [
            f"On the same {count} held-out conversations the candidate's τ differs by {test.gain.value:+.3f} from that",
            f"of draft {test.parent}. The true difference is at least {test.gain.low:+.3f}, with a chance of",
            f"{test.alpha:.2%} that this bound is wrong. It must be above 0, so {shown}.",
            *_domains_in_words(report.domains, test.params),
            "So it may serve." if report.verdict == PASSED else f"So it does not replace draft {test.parent}.",
        ]
    )


def thresholds(test: GateTest) -> dict[str, str]:
    """Return what the candidate was held to: name to value, in words."""
    params = test.params
    return {
        "gain over all conversations": f"lower bound above 0, wrong with a chance of {test.alpha:.2%}",
        "change in each domain": f"lower bound at {params.confidence:.0%} not below {-params.floor:.1%} of its best τ",
        "conversations in each domain": f"{params.min_conversations} or more",
        "error budget": (
            f"this was test {test.test_index} of its line of drafts. All tests of a line together may pass a draft "
            f"without gain with a chance of {params.alpha_total:.0%}; test k gets 6 / (π² k²) of that"
        ),
        "bounds": f"from {params.num_resamples} resamples of whole conversations, in pairs and within their domain",
    }


def evidence_table(report: GateReport) -> tuple[tuple[str, ...], Sequence[tuple[str, ...]]]:
    """Return the columns and one row a domain, ready to be shown."""
    if report.test is None:
        return ("domain", "conversations", "τ"), [
            (domain, str(one.num_conversations), _tau(one.tau_after)) for domain, one in report.domains.items()
        ]
    floor = f"{-report.test.params.floor:+.1%}"
    columns = ("domain", "conversations", "τ before", "τ after", "best τ", "change", "lower bound", "floor", "verdict")
    return columns, [
        (
            domain,
            str(one.num_conversations),
            _tau(one.tau_before),
            _tau(one.tau_after),
            _tau(one.reference),
            *(("–", "–") if one.change is None else (f"{one.change.value:+.1%}", f"{one.change.low:+.1%}")),
            floor,
            _standing(one),
        )
        for domain, one in report.domains.items()
    ]


def markdown(report: GateReport) -> str:
    """Return the report as a page."""
    columns, rows = evidence_table(report)
    lines = [f"# {TITLES[report.verdict]}", "", explain(report), ""]
    lines += [_line(columns), _line(["---"] * len(columns)), *map(_line, rows), ""]
    if (test := report.test) is not None:
        lines.append(_origin(test))
        if test.left_out:
            lines.append(f"With too few conversations to judge: {', '.join(test.left_out)}.")
        lines += ["", "## What was required", ""]
        lines += [f"- {name}: {value}" for name, value in thresholds(test).items()]
        lines.append("")
    if report.reasons:
        lines += ["## Reasons", "", *(f"- {reason}" for reason in report.reasons), ""]
    lines.append(f"{MEANING}, at K = {report.num_draft_tokens}.")
    return "\n".join(lines) + "\n"


def write_files(report: GateReport, folder: Path) -> list[Path]:
    """Write the report into an existing folder and return its files."""
    (folder / PAGE).write_text(markdown(report), encoding="utf-8")
    (folder / DATA).write_text(report.model_dump_json(indent=1) + "\n", encoding="utf-8")
    files = [folder / PAGE, folder / DATA]
    if (test := report.test) is not None:
        changes = {domain: one.change for domain, one in report.domains.items() if one.change is not None}
        files.append(draw_gate(test.gain, changes, test.params.floor, folder / FIGURE))
    return files


def _domains_in_words(domains: Mapping[str, DomainEvidence], params: Limits) -> list[str]:
    against = {domain: one for domain, one in domains.items() if one.refusals}
    losing = [f"{domain} ({one.change.low:+.1%})" for domain, one in against.items() if one.change is not None]
    small = [f"{domain} ({one.num_conversations})" for domain, one in against.items() if one.change is None]
    said = []
    if losing:
        most = f"{params.floor:.1%} of the best τ"
        said.append(f"By the lower bound the candidate may lose more than {most} in {', '.join(losing)}.")
    if small:
        said.append(f"Too few conversations to judge: {', '.join(small)}.")
    return said or [f"The candidate was not found to lose more than {params.floor:.1%} of the best τ in any domain."]


def _origin(test: GateTest) -> str:
    if test.rows is None:
        return f"Trained elsewhere, and compared with draft {test.parent}."
    first, last = test.rows
    return f"Trained from draft {test.parent} on rows {first} to {last} of the query log."


def _standing(evidence: DomainEvidence) -> str:
    if not evidence.refusals:
        return "keeps its floor"
    return "too few conversations" if evidence.change is None else "may lose"


def _tau(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"
