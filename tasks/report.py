"""One page about a home folder: what serves, what is accepted, how fast, which drafts there are and why.

The page loads nothing and runs no script. All text in it is escaped by the template; the charts are made of numbers and
escaped labels. What is not there is said.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from infra.registry import Version
from models.acceptance import Estimate
from tasks.charts import MAX_SERIES, bar_chart, interval_chart, line_chart
from tasks.gate_report import MEANING, GateReport, evidence_table, explain, thresholds
from tasks.served import Group, Served, curves, groups, swaps

TEMPLATE = "report.html"
WINDOW = 20
MAX_GATES = 20
NONE = "–"
LINEAGE_LABELS = {
    "target_name": "target",
    "target_version": "target version",
    "target_sha256": "target weights, sha256",
    "tokenizer_sha256": "tokenizer, sha256",
    "vocab_size": "vocabulary size",
    "chat_template_sha256": "chat template, sha256",
    "parent": "parent draft",
    "line": "line of drafts",
    "window_first_seq": "first row trained on",
    "window_last_seq": "last row trained on",
    "window_sha256": "training window, sha256",
    "samples_sha256": "first samples, sha256",
    "sampling": "sampling",
    "quantization": "quantization",
    "seed": "seed",
    "git_commit": "code revision",
    "flow_run": "flow run",
    "gate_test": "test of its line",
    "probe_tau": "τ on the golden prompts",
    "previous": "champion before it",
    "forced": "promoted by hand because",
    "quarantined": "quarantined because",
    "sha256": "its files, sha256",
}


@dataclass(frozen=True)
class Demonstration:
    """A run of `redraft demo`.

    Attributes:
        name: of its folder.
        result: what it printed at its end; None if it has not come there.
        served: its answers, in their order.
    """

    name: str
    result: Mapping[str, Any] | None
    served: Sequence[Served]


@dataclass(frozen=True)
class Findings:
    """What the page tells.

    Attributes:
        state: what `redraft status` shows.
        target: the champion target, None before the first build.
        drafts: all versions, newest first.
        gates: number of a draft to its gate report; those without one are not in it.
        served: the log's last requests that tell what was accepted, in their order.
        num_rows: how many of the log's last rows were looked through for them.
        demonstrations: by name.
        written: when.
        commit: revision of the code that writes, "" if unknown.
    """

    state: Mapping[str, Any]
    target: Version | None
    drafts: Sequence[Version]
    gates: Mapping[int, GateReport]
    served: Sequence[Served]
    num_rows: int
    demonstrations: Sequence[Demonstration]
    written: datetime
    commit: str


@dataclass(frozen=True)
class Table:
    """A caption, the columns, which of them hold figures, and rows of text."""

    caption: str
    columns: Sequence[str]
    numeric: frozenset[int]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Figure:
    """A chart and the sentence below it."""

    chart: Markup
    caption: str


def page(found: Findings) -> str:
    """Return the page as HTML."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(TEMPLATE).render(
        written=_when(found.written),
        commit=found.commit[:12],
        cards=_cards(found),
        serving=_serving(found),
        programs=_programs(found.state["programs"]),
        acceptance=_acceptance("log", found.served),
        num_served=len(found.served),
        num_rows=found.num_rows,
        takeovers=[f"draft {swap.draft} took over at request {swap.number}" for swap in swaps(found.served)],
        meaning=MEANING,
        demonstrations=[_demonstration(index, demo) for index, demo in enumerate(found.demonstrations)],
        versions=_versions(found),
        lineages=[(version.number, _lineage(version)) for version in found.drafts],
        gates=[_gate(version, found.gates.get(version.number)) for version in found.drafts[:MAX_GATES]],
        num_ungated=max(0, len(found.drafts) - MAX_GATES),
        refreshed=found.state["last_refresh"] is not None,
        log=_log(found.state["log"]),
    )


def _cards(found: Findings) -> list[tuple[str, str, str]]:
    champion = next((draft for draft in found.state["drafts"] if draft["champion"]), None)
    service, log = found.state["service"], found.state["log"]
    number, note = (
        ("none", "nothing built yet") if champion is None else (champion["version"], f"τ {_taus(champion['tau'])}")
    )
    return [
        ("Champion draft", str(number), note),
        (
            "Service",
            "not running" if service is None else f"draft {service['draft_version'] or 'none'}",
            "" if service is None else "speculating" if service["speculating"] else "speculation is off",
        ),
        ("Rows waiting", f"{log['depth']:,}", f"of {log['total']:,} in the query log"),
        ("Rows dropped", f"{log['dropped']:,}", f"{log['duplicates']:,} came twice"),
    ]


def _serving(found: Findings) -> Table:
    champion = next((draft for draft in found.state["drafts"] if draft["champion"]), None)
    rows = [
        ("target", "none yet; run: redraft build" if found.target is None else _target(found.target)),
        ("champion draft", "none yet; run: redraft build" if champion is None else f"version {champion['version']}"),
    ]
    service = found.state["service"]
    if service is None:
        rows.append(("service", "none answers; redraft serve or redraft up starts it"))
    else:
        refused, postponed = (
            "; ".join(f"{name}: {reason}" for name, reason in service[kind].items())
            for kind in ("refused", "postponed")
        )
        requests = ", ".join(f"{number:,} with {status}" for status, number in service["requests"].items())
        silent = f"off: {service['fallback'] or 'an operator wants it'}"
        rows += [
            ("service", f"answers on {service['url']}/v1"),
            ("draft in the engine", f"version {service['draft_version']}" if service["draft_version"] else "none"),
            ("speculation", "on" if service["speculating"] else silent),
            ("requests answered", requests or "none yet"),
            ("swaps of the draft", f"{service['swaps']} since its start"),
            ("drafts it refused", refused or "none"),
            ("drafts it tries again", postponed or "none"),
        ]
    return Table("What is to be served, and what is", ("what", "now"), frozenset(), rows)


def _target(target: Version) -> str:
    return f"{target.tags.get('target_name', 'of no name')}, version {target.number}"


def _programs(programs: Sequence[Mapping[str, Any]]) -> Table | None:
    if not programs:
        return None
    rows = [
        (
            program["name"],
            "running" if program["ready"] else "starting" if program["pid"] else "down",
            str(program["restarts"]),
            program["url"] or NONE,
        )
        for program in programs
    ]
    return Table("Programs of redraft up", ("program", "state", "restarts", "address"), frozenset({2}), rows)


def _acceptance(key: str, served: Sequence[Served]) -> tuple[Figure, Table] | None:
    """Return the chart of a stretch of requests and its sums; None if there is no request."""
    if not served:
        return None
    summed = groups(served)
    sizes: dict[str, int] = {}
    for group in summed:
        sizes[group.domain] = sizes.get(group.domain, 0) + group.num_requests
    largest = sorted(sorted(sizes, key=lambda domain: -sizes[domain])[:MAX_SERIES])
    drawn = {domain: parts for domain, parts in curves(served, WINDOW).items() if domain in largest}
    takeovers = swaps(served)
    chart = line_chart(
        f"acceptance-{key}",
        "τ over the served requests",
        f"A running τ for each of the domains {', '.join(largest)} over {len(served)} requests, with "
        f"{len(takeovers)} swaps of the draft marked. The table has the figures.",
        {domain: drawn[domain] for domain in largest},
        [(swap.number, f"draft {swap.draft}") for swap in takeovers],
        ("request", f"τ, tokens a step, mean of {WINDOW} requests"),
        1.0,
    )
    caption = (
        f"Running mean of {WINDOW} requests of one domain and one draft, from the {WINDOW // 4}th on. "
        "A dashed line: another draft takes over."
    )
    if len(sizes) > MAX_SERIES:
        caption += f" Drawn are the {MAX_SERIES} largest of {len(sizes)} domains."
    table = Table(
        "Acceptance by domain and draft, with 95% intervals",
        ("domain", "draft", "requests", "τ", "acceptance rate", "ms a token"),
        frozenset({1, 2, 3, 4, 5}),
        [_group_row(group) for group in summed],
    )
    return Figure(chart, caption), table


def _group_row(group: Group) -> tuple[str, ...]:
    return (
        group.domain,
        str(group.draft),
        f"{group.num_requests:,}",
        _interval(group.tau, ".2f"),
        _interval(group.rate, ".1%"),
        NONE if group.per_token_ms is None else f"{group.per_token_ms:.1f}",
    )


def _demonstration(index: int, demo: Demonstration) -> dict[str, Any]:
    """Return what the template shows of a demonstration."""
    shown: dict[str, Any] = {"name": demo.name, "acceptance": _acceptance(f"demo-{index}", demo.served), "result": None}
    if demo.result is None:
        return shown
    result = demo.result
    on, off = result["tokens_per_s"]["on"], result["tokens_per_s"]["off"]
    bars = {domain: {"speculation on": on[domain], "speculation off": off[domain]} for domain in result["domains"]}
    rows = [
        (
            domain,
            str(compared["after"]["num_sequences"]),
            _interval(_estimate(compared["before"]["tau"]), ".2f"),
            _interval(_estimate(compared["after"]["tau"]), ".2f"),
            _interval(_estimate(compared["gain"]), "+.2f"),
        )
        for domain, compared in result["domains"].items()
    ]
    columns = ("domain", "prompts", "τ before", "τ after", "gain")
    times = [
        (domain, f"{on[domain]:.1f}", f"{off[domain]:.1f}", f"{on[domain] / off[domain]:.2f}×")
        for domain in result["domains"]
    ]
    verdicts = ", ".join(f"{number} {verdict}" for verdict, number in result["outputs"]["verdicts"].items())
    return shown | {
        "result": result,
        "verdicts": f"{result['outputs']['num_compared']} outputs against decoding without speculation: {verdicts}",
        "requests": ", ".join(f"{number} {status}" for status, number in result["requests"].items()),
        "table": Table(
            "Held-out prompts before and after the swap, 95% intervals", columns, frozenset({1, 2, 3, 4}), rows
        ),
        "times": Table(
            "Tokens a second of one stream",
            ("domain", "speculation on", "off", "on / off"),
            frozenset({1, 2, 3}),
            times,
        ),
        "speed": Figure(
            bar_chart(
                f"speed-{index}",
                "Speed with speculation on and off",
                "; ".join(
                    f"{domain}: {on[domain]:.1f} tokens a second with speculation, {off[domain]:.1f} without"
                    for domain in bars
                ),
                bars,
                "tokens a second, one stream, first token excluded",
            ),
            "The same prompts, each once with and once without speculation, in turn.",
        ),
    }


def _versions(found: Findings) -> Table:
    shown = {draft["version"]: draft for draft in found.state["drafts"]}
    rows = [
        (
            str(version.number),
            _status(version, shown[version.number]["champion"]),
            _when(datetime.fromtimestamp(version.created_ms / 1000, UTC)),
            version.tags["parent"] or NONE,
            shown[version.number]["rows"] or NONE,
            version.tags["gate"] or "none",
            _taus(shown[version.number]["tau"]),
        )
        for version in found.drafts
    ]
    columns = ("draft", "status", "registered (UTC)", "parent", "rows", "gate", "τ, held out")
    return Table("Drafts in the registry, newest first", columns, frozenset({0, 3, 4}), rows)


def _status(version: Version, champion: bool) -> str:
    if "quarantined" in version.tags:
        return "quarantined"
    if champion:
        return "champion"
    return "was champion" if "previous" in version.tags else "never promoted"


def _lineage(version: Version) -> Table:
    rows = [
        (label, version.tags[tag] or "does not apply") for tag, label in LINEAGE_LABELS.items() if tag in version.tags
    ]
    return Table(f"Lineage of draft {version.number}", ("what", "value"), frozenset(), rows)


def _gate(version: Version, report: GateReport | None) -> dict[str, Any]:
    """Return what the template shows of a draft's gate."""
    shown: dict[str, Any] = {
        "number": version.number,
        "verdict": version.tags["gate"] or "none",
        "quarantined": version.tags.get("quarantined", ""),
        "forced": version.tags.get("forced", ""),
        "reasons": version.tags.get("gate_reasons", ""),
        "report": None,
    }
    if report is None:
        return shown
    columns, rows = evidence_table(report)
    numeric = frozenset(range(1, len(columns))) - {columns.index("verdict") if "verdict" in columns else 0}
    figure = None
    if report.test is not None:
        changes = {
            domain: _scaled(one.change, 100.0) for domain, one in report.domains.items() if one.change is not None
        }
        floor = report.test.params.floor
        if changes:
            chart = interval_chart(
                f"gate-{version.number}",
                f"Change of τ by domain, draft {version.number} against the best before it",
                "; ".join(
                    f"{domain}: {one.value:+.1f}%, lower bound {one.low:+.1f}%" for domain, one in changes.items()
                )
                + f"; the floor is {-100 * floor:.1f}%",
                changes,
                [(0.0, ""), (-100 * floor, f"floor {-floor:.1%}")],
                "change of τ, % of the domain's best",
            )
            caption = f"Each end of a line is a one-sided bound at {report.test.params.confidence:.0%}. "
            figure = Figure(chart, f"{caption}The lower end must not lie below the floor.")
    return shown | {
        "report": report,
        "why": explain(report),
        "table": Table(f"Evidence on draft {version.number} by domain", columns, numeric, rows),
        "figure": figure,
        "thresholds": {} if report.test is None else thresholds(report.test),
    }


def _log(log: Mapping[str, Any]) -> Table:
    rows = [
        ("rows", f"{log['total']:,}"),
        *((f"rows of domain {domain}", f"{count:,}") for domain, count in log["per_domain"].items()),
        ("rows waiting for a refresh", f"{log['depth']:,}"),
        ("last row trained on", f"{log['cursor']:,}" if log["cursor"] else "none yet"),
        ("rows dropped", f"{log['dropped']:,}"),
        ("rows that came twice", f"{log['duplicates']:,}"),
        ("size on disk", f"{log['bytes'] / 2**20:,.1f} MiB"),
    ]
    return Table("Query log", ("what", "count"), frozenset({1}), rows)


def _taus(taus: Mapping[str, float]) -> str:
    return ", ".join(f"{domain} {tau:.2f}" for domain, tau in taus.items()) or NONE


def _estimate(dumped: Mapping[str, float] | None) -> Estimate | None:
    return None if dumped is None else Estimate(**dumped)


def _scaled(estimate: Estimate, factor: float) -> Estimate:
    return Estimate(value=factor * estimate.value, low=factor * estimate.low, high=factor * estimate.high)


def _interval(estimate: Estimate | None, form: str) -> str:
    if estimate is None:
        return NONE
    return f"{estimate.value:{form}} ({estimate.low:{form}} to {estimate.high:{form}})"


def _when(moment: datetime) -> str:
    return f"{moment:%Y-%m-%d %H:%M}"
