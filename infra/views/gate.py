"""Why a draft passed its gate or did not, for people and for programs.

Each draft's run in MLflow keeps a page (gate.md), the same as data (gate.json) and, where a gate judged, a figure
(gate.png). They are written from one object, so that they can't disagree.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal

from pydantic import ConfigDict

from infra.views import MEANING, Interval, Shown
from infra.views.figures import draw_gate

Outcome = Literal["passed", "undecided", "refused", "unjudged"]
PASSED: Literal["passed"] = "passed"
UNDECIDED: Literal["undecided"] = "undecided"
REFUSED: Literal["refused"] = "refused"
UNJUDGED: Literal["unjudged"] = "unjudged"
PAGE, DATA, FIGURE = "gate.md", "gate.json", "gate.png"
TITLES = {
    PASSED: "Gate passed",
    UNDECIDED: "Gate undecided",
    REFUSED: "Gate refused",
    UNJUDGED: "No gate: the first draft of its line",
}


class DomainEvidence(Shown):
    """What was found in one domain.

    Attributes:
        num_conversations: that the draft and the domain's best past one were scored on.
        tau_before: the champion's τ; None without a champion or a conversation.
        tau_after: the draft's own τ; None without a conversation.
        reference: τ of the domain's best past draft.
        change: (τ after − reference) / reference on the same conversations; its `low` is held against −floor.
        refusals: why the domain stands against promotion; empty if it does not.
        binding: whether there are enough conversations, and long enough ones, for a loss to block.
    """

    num_conversations: int
    tau_before: float | None
    tau_after: float | None
    reference: float | None
    change: Interval | None
    refusals: tuple[str, ...]
    binding: bool = True


class Limits(Shown):
    """What a candidate was held to: those of the gate's settings that are told.

    Attributes:
        floor: share of τ that a domain may lose.
        confidence: of each domain's one-sided bound.
        num_resamples: that the domains' bounds are from.
        floor_conversations: of a domain, from which on its floor holds.
        alpha_total: chance that a champion is ever replaced by a draft without gain.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    floor: float
    confidence: float
    num_resamples: int
    floor_conversations: int = 0
    alpha_total: float


class GateTest(Shown):
    """The test over all conversations, and what it was held to.

    Attributes:
        parent: the champion that the challenger was compared with; also the one that it was trained from, if it was
            trained here.
        continues: the snapshot that it went on from; None if from the champion, or if it was trained elsewhere.
        returns: the past draft that it is; None if it is not one.
        rows: first and last of the query log that it was trained on last; None for a draft from elsewhere, and for one
            that returns.
        gain: difference in accepted tokens a step over all its windows, where what is alike counts once; each end is
            wrong with chance `alpha`, however often it is looked at.
        last: that of the last window's traffic, where each counts as often as it is asked, with a 95% interval for this
            one look.
        num_windows, num_conversations, num_clusters: that the gain is from.
        test_index: which challenger of its champion this was, from 1.
        params: floor, confidence and error budget.
        left_out: domains without a conversation to judge.
    """

    parent: int
    continues: int | None = None
    returns: int | None = None
    rows: tuple[int, int] | None
    gain: Interval
    alpha: float
    test_index: int
    params: Limits
    left_out: tuple[str, ...]
    last: Interval | None = None
    num_windows: int = 1
    num_conversations: int = 0
    num_clusters: int = 0


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
        return f"{TITLES[report.verdict]}: {report.reasons[0]}{more}."
    gain = report.test.gain
    against = f"against draft {report.test.parent}, at least {gain.low:+.3f}"
    return f"{TITLES[PASSED]}: {gain.value:+.3f} tokens a step {against}."


def explain(report: GateReport) -> str:
    """Return in plain words what was asked and what the answer was."""
    test = report.test
    if test is None:
        return (
            "This draft was not trained from another one. There was no champion to compare it with, so no gate judged "
            "it. The figures are its own, on conversations it was not trained on."
        )
    shown = "a gain is shown" if test.gain.low > 0 else "a loss is shown" if test.gain.high < 0 else "no gain is shown"
    count = test.num_conversations or sum(evidence.num_conversations for evidence in report.domains.values())
    windows = "its window" if test.num_windows == 1 else f"its {test.num_windows} windows"
    return " ".join(
        [
            f"On the same {count} held-out conversations of {windows}, where those that are alike count once, the",
            f"challenger's accepted tokens a step differ by {test.gain.value:+.3f} from those of draft {test.parent}.",
            "The true difference is at least",
            f"{test.gain.low:+.3f}, with a chance of {test.alpha:.2%} that this bound is wrong, however often it is",
            f"looked at. It must be above 0, so {shown}.",
            *_traffic_in_words(test.last),
            *_domains_in_words(report.domains, test.params),
            _consequence(report.verdict, test.parent),
        ]
    )


def thresholds(test: GateTest) -> dict[str, str]:
    """Return what the candidate was held to: name to value, in words."""
    params = test.params
    return {
        "gain over all windows": f"lower bound above 0, wrong with a chance of {test.alpha:.2%}",
        "gain of the last window": "not below 0",
        "change in each domain": f"lower bound at {params.confidence:.0%} not below {-params.floor:.1%} of its best τ",
        "conversations in each domain": f"{params.floor_conversations} or more for a loss to block",
        "error budget": (
            f"this was challenger {test.test_index} of its champion. All challengers of one may replace it without "
            f"gain with a chance of {params.alpha_total:.0%}; the j-th gets 6 / (π² j²) of that"
        ),
        "bounds": f"of domains from {params.num_resamples} resamples of whole clusters, in pairs",
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
            lines.append(f"Without a conversation to judge: {', '.join(test.left_out)}.")
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


def _traffic_in_words(last: Interval | None) -> list[str]:
    if last is None:
        return []
    ends = f"{last.low:+.3f} to {last.high:+.3f}, 95%"
    return [f"The traffic of its last window, by how often each is asked, gains {last.value:+.3f} ({ends})."]


def _domains_in_words(domains: Mapping[str, DomainEvidence], params: Limits) -> list[str]:
    losing = [f"{domain} ({one.change.low:+.1%})" for domain, one in domains.items() if one.refusals and one.change]
    loose = [f"{domain} ({one.num_conversations})" for domain, one in domains.items() if not one.binding]
    most = f"{params.floor:.1%} of the best τ"
    said = [f"The challenger was not found to lose more than {most} in any domain."]
    if losing:
        said = [f"By the lower bound the challenger may lose more than {most} in {', '.join(losing)}."]
    if loose:
        said.append(f"Too few conversations, or too short ones, for a floor to hold: {', '.join(loose)}.")
    return said


def _consequence(verdict: Outcome, champion: int) -> str:
    if verdict == PASSED:
        return "So it may serve."
    return f"So it {'learns on' if verdict == UNDECIDED else 'is given up'}, and draft {champion} stays."


def _origin(test: GateTest) -> str:
    if test.returns is not None:
        return (
            f"Draft {test.returns}, which served before, compared with draft {test.parent}; it was not trained again."
        )
    if test.rows is None:
        return f"Trained elsewhere, and compared with draft {test.parent}."
    first, last = test.rows
    start = f"from draft {test.parent}" if test.continues is None else f"on from draft {test.continues}"
    return f"Trained {start} on rows {first} to {last} of the query log, and compared with draft {test.parent}."


def _standing(evidence: DomainEvidence) -> str:
    if not evidence.binding:
        return "says too little to block"
    if not evidence.refusals:
        return "keeps its floor"
    return "may lose"


def _tau(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"
