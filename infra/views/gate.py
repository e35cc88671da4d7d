"""Why a draft passed its gate or did not, for people and for programs.

Each draft's run in MLflow keeps a page (gate.md), the same as data (gate.json) and, where a gate tested, a figure
(gate.svg). They are written from one object, so that they can't disagree.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from markupsafe import Markup

from infra.views import MEANING
from infra.views.charts import interval_chart, write_charts
from models.types import DomainEvidence, Estimate, GateParams, GateReport, GateTest, GateVerdict

PAGE, DATA, FIGURE = "gate.md", "gate.json", "gate.svg"
TITLES: dict[GateVerdict | None, str] = {
    "passed": "Gate passed",
    "undecided": "Gate undecided",
    "refused": "Gate refused",
    None: "No gate: the first draft of its line",
}


def headline(report: GateReport) -> str:
    """Return verdict and reason in one line."""
    if report.test is None:
        return f"{TITLES[None]}; there was no champion to compare it with."
    if report.reasons:
        more = f" (and {len(report.reasons) - 1} more)" if len(report.reasons) > 1 else ""
        return f"{TITLES[report.verdict]}: {report.reasons[0]}{more}."
    gain = report.test.gain
    against = f"against draft {report.test.parent}, at least {gain.low:+.3f}"
    return f"{TITLES['passed']}: {gain.value:+.3f} tokens a step {against}."


def explain(report: GateReport) -> str:
    """Return in plain words what was asked and what the answer was."""
    test = report.test
    if test is None:
        return (
            "This draft was not trained from another one. There was no champion to compare it with, so no gate tested "
            "it. The figures are its own, on conversations it was not trained on."
        )
    shown = "a gain is shown" if test.gain.low > 0 else "a loss is shown" if test.gain.high < 0 else "no gain is shown"
    windows = "its window" if test.num_windows == 1 else f"its {test.num_windows} windows"
    return " ".join(
        [
            f"On the same {test.num_conversations} held-out conversations of {windows}, where those that are alike",
            "count once, the challenger's accepted tokens a step differ by",
            f"{test.gain.value:+.3f} from those of draft {test.parent}.",
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
        return ("domain", "conversations", "τ", "vocabulary"), [
            (domain, str(one.num_conversations), _tau(one.tau_after), _share(one.coverage))
            for domain, one in report.domains.items()
        ]
    floor = f"{-report.test.params.floor:+.1%}"
    before = ("domain", "conversations", "τ before", "τ after", "best τ", "vocabulary")
    columns = (*before, "change", "lower bound", "floor", "verdict")
    return columns, [
        (
            domain,
            str(one.num_conversations),
            _tau(one.tau_before),
            _tau(one.tau_after),
            _tau(one.reference),
            _share(one.coverage),
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
            lines.append(f"Without a conversation to score: {', '.join(test.left_out)}.")
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
        gain = f"{test.gain.text('+.3f')} tokens a step, held against 0"
        lines, label = [(0.0, "the lower end must be above 0")], "change of τ, tokens a step"
        charts = [interval_chart("gain", "Gain over all windows", gain, {"all": test.gain}, lines, label)]
        changes = change_chart("changes", "Change of τ by domain", report)
        files.append(write_charts([*charts, *([changes] if changes else [])], folder / FIGURE))
    return files


def change_chart(key: str, title: str, report: GateReport) -> Markup | None:
    """Return a chart of what each domain pays, held against the floor; None where no domain has one."""
    changes = {domain: one.change.times(100.0) for domain, one in report.domains.items() if one.change is not None}
    if report.test is None or not changes:
        return None
    floor = report.test.params.floor
    told = [f"{domain}: {one.value:+.1f}%, lower bound {one.low:+.1f}%" for domain, one in changes.items()]
    description = f"{'; '.join(told)}; the floor is {-100 * floor:.1f}%"
    lines = [(0.0, ""), (-100 * floor, f"floor {-floor:.1%}")]
    return interval_chart(key, title, description, changes, lines, "change of τ, % of the domain's best")


def _traffic_in_words(last: Estimate | None) -> list[str]:
    if last is None:
        return []
    ends = f"{last.low:+.3f} to {last.high:+.3f}, 95%"
    return [f"The traffic of its last window, by how often each is asked, gains {last.value:+.3f} ({ends})."]


def _domains_in_words(domains: Mapping[str, DomainEvidence], params: GateParams) -> list[str]:
    losing = [f"{domain} ({one.change.low:+.1%})" for domain, one in domains.items() if one.refusals and one.change]
    loose = [f"{domain} ({one.num_conversations})" for domain, one in domains.items() if not one.binding]
    most = f"{params.floor:.1%} of the best τ"
    said = [f"The challenger was not found to lose more than {most} in any domain."]
    if losing:
        said = [f"By the lower bound the challenger may lose more than {most} in {', '.join(losing)}."]
    if loose:
        said.append(f"Too few conversations, or too short ones, for a floor to hold: {', '.join(loose)}.")
    return said


def _consequence(verdict: GateVerdict | None, champion: int | None) -> str:
    if verdict == "passed":
        return "So it may serve."
    return f"So it {'learns on' if verdict == 'undecided' else 'is given up'}, and draft {champion} stays."


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


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"
