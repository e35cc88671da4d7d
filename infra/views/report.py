"""One page about a home folder: what serves, what is accepted, how fast, which drafts there are and why."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from markupsafe import Markup

from infra.overview import Overview
from infra.querylog import LogStats
from infra.supervisor import ProcessRecord
from infra.versions import Version
from infra.views import MEANING, NONE, shown
from infra.views.acceptance import Acceptance, curves, swaps
from infra.views.charts import MAX_SERIES, bar_chart, line_chart
from infra.views.dashboard import Card, Figure, Table, render, told_of
from infra.views.gate import change_chart, evidence_table, explain, thresholds
from infra.views.overview import absent, follows, last_gate, servers, taus_in_words
from models.types import Estimate, GateReport

TEMPLATE = "report.html"
WINDOW, MAX_GATES = 20, 20
LINEAGE_LABELS = {
    "target_name": "target",
    "target_version": "target version",
    "target_sha256": "target weights, sha256",
    "tokenizer_sha256": "tokenizer, sha256",
    "vocab_size": "vocabulary size",
    "chat_template_sha256": "chat template, sha256",
    "parent": "parent draft",
    "continues": "checkpoint that it resumed",
    "returns_for": "past draft, tried again for",
    "line": "line of drafts",
    "window_first_seq": "first row trained on",
    "window_last_seq": "last row trained on",
    "window_sha256": "training window, sha256",
    "samples_sha256": "first samples, sha256",
    "sampling": "sampling",
    "quantization": "quantization",
    "seed": "seed",
    "num_draft_tokens": "drafted tokens a step",
    "git_commit": "code revision",
    "flow_run": "flow run",
    "gate_test": "challenger of its champion",
    "golden_tau": "τ on the golden prompts",
    "previous": "champion before it",
    "forced": "promoted by hand because",
    "quarantined": "quarantined because",
    "sha256": "its files, sha256",
}


@dataclass(frozen=True)
class Demonstration:
    """A run of `redraft demo`; `result` is what it printed at its end, None if it has not come there."""

    name: str
    result: Mapping[str, Any] | None
    acceptance: Acceptance


@dataclass(frozen=True)
class Findings:
    """What the page tells.

    Attributes:
        gates: number of a draft to its gate report; those without one are not in it.
        acceptance: of the log's last requests that tell it, of `num_rows` that were looked through.
    """

    state: Overview
    drafts: Sequence[Version]
    gates: Mapping[int, GateReport]
    acceptance: Acceptance
    num_rows: int
    demonstrations: Sequence[Demonstration]
    written: datetime
    commit: str


def page(found: Findings) -> str:
    return render(
        TEMPLATE,
        written=_when(found.written),
        commit=found.commit[:12],
        shown_cards=_cards(found),
        serving=_serving(found),
        programs=_programs(found.state.programs),
        acceptance=_acceptance("log", found.acceptance),
        num_served=len(found.acceptance.served),
        num_rows=found.num_rows,
        takeovers=[f"{swap.draft} took over at {_at(swap.at)} UTC" for swap in swaps(found.acceptance.served)],
        meaning=MEANING,
        demonstrations=[_demonstration(index, demo) for index, demo in enumerate(found.demonstrations)],
        versions=_versions(found),
        lineages=[(version.number, _lineage(version)) for version in found.drafts],
        gates=[_gate(version, found.gates.get(version.number)) for version in found.drafts[:MAX_GATES]],
        num_ungated=max(0, len(found.drafts) - MAX_GATES),
        refreshed=found.state.last_refresh is not None,
        log=_log(found.state.log),
    )


def _cards(found: Findings) -> list[Card]:
    champion, service, log = found.state.champion, found.state.service, found.state.log
    number, note = "none", "nothing built yet"
    if champion is not None:
        number, note = str(champion.version), f"τ {taus_in_words(champion.tau) or NONE}"
    card = Card("Service", absent(found.state).partition(";")[0], "")
    if service is not None:
        speculates = "speculating" if service.speculating else "speculation is off"
        card = Card("Service", f"draft {service.draft_version or 'none'}", speculates)
    elif follows(found.state):
        serve = [row.version for row in found.state.attached if row.state == "serving"]
        drafts = ", ".join(sorted({version.partition("-")[0] for version in serve if version}))
        card = Card(
            "Attached servers", f"{len(serve)} of {len(found.state.attached)} serve", drafts and f"draft {drafts}"
        )
    return [
        Card("Champion draft", number, note),
        card,
        Card("Rows waiting", f"{log.depth:,}", f"of {log.total:,} in the query log"),
        Card("Rows dropped", f"{log.dropped:,}", f"{log.duplicates:,} were duplicates"),
    ]


def _serving(found: Findings) -> Table:
    state, champion, service = found.state, found.state.champion, found.state.service
    none = "none yet; run: redraft build --recipe FILE"
    rows = [
        ("target", state.target or none),
        ("champion draft", none if champion is None else f"version {champion.version}"),
        ("last gate", "none yet" if state.last_gate is None else last_gate(state.last_gate)),
        ("the loop", f"waits for {state.waiting.words}"),
    ]
    if service is not None:
        rows += [("service", f"answers on {service.url}/v1"), *told_of(service)]
    elif not follows(state):
        rows.append(("service", absent(state)))
    rows += [(name, "; ".join(told)) for name, told in servers(state).items()]
    pages = {name: link for name, link in state.links.items() if name != "report"}
    rows += [(name, Markup('<a href="{0}">{0}</a>').format(link)) for name, link in pages.items()]
    return Table("What should serve, and what does", ("what", "now"), rows)


def _programs(programs: Sequence[ProcessRecord]) -> Table | None:
    rows = [(one.name, one.state, str(one.restarts), one.url or NONE) for one in programs]
    return Table("Programs of redraft up", ("program", "state", "restarts", "address"), rows, {2}) if rows else None


def _acceptance(key: str, acceptance: Acceptance) -> tuple[Figure, Table] | None:
    served, groups = acceptance
    if not served:
        return None
    sizes: Counter[str] = Counter()
    for group in groups:
        sizes[group.domain] += group.num_requests
    largest = sorted(domain for domain, _ in sizes.most_common(MAX_SERIES))
    drawn, takeovers, over_time = curves(served, WINDOW), swaps(served), served[0].time_ms is not None
    chart = line_chart(
        f"acceptance-{key}",
        "τ over the served requests",
        f"A running τ for each of the domains {', '.join(largest)} over {len(served)} requests, with "
        f"{len(takeovers)} swaps of the draft marked. The table has the figures.",
        {domain: drawn[domain] for domain in largest},
        [(swap.at, f"draft {swap.draft}") for swap in takeovers],
        (
            f"{_at(served[0].at)} to {_at(served[-1].at)} UTC" if over_time else "request",
            f"τ, tokens a step, mean of {WINDOW} requests",
        ),
        1.0,
        over_time,
    )
    caption = (
        f"Running mean of {WINDOW} requests of one domain and one draft, from the {WINDOW // 4}th on. "
        "Dashed line: another draft took over."
    )
    if len(sizes) > MAX_SERIES:
        caption += f" Shows the {MAX_SERIES} largest of {len(sizes)} domains."
    rows = [
        (
            *(one.domain, str(one.draft), f"{one.num_requests:,}", one.tau.text(".2f")),
            *(NONE if one.rate is None else one.rate.text(".1%"), shown(one.per_token_ms, ".1f")),
        )
        for one in groups
    ]
    columns = ("domain", "draft", "requests", "τ", "acceptance rate", "ms a token")
    table = Table("Acceptance by domain and draft, with 95% intervals", columns, rows, {1, 2, 3, 4, 5})
    return Figure(chart, caption), table


def _demonstration(index: int, demo: Demonstration) -> dict[str, Any]:
    told = {"name": demo.name, "acceptance": _acceptance(f"demo-{index}", demo.acceptance), "result": demo.result}
    if (result := demo.result) is None:
        return told
    on, off, domains = result["tokens_per_s"]["on"], result["tokens_per_s"]["off"], result["domains"]
    bars = {domain: {"speculation on": on[domain], "speculation off": off[domain]} for domain in domains}
    speeds = (f"{one}: {on[one]:.1f} tokens a second with speculation, {off[one]:.1f} without" for one in domains)
    axis = "tokens a second, one stream, first token excluded"
    chart = bar_chart(f"speed-{index}", "Speed with speculation on and off", "; ".join(speeds), bars, axis)
    rows = [
        (
            *(domain, str(compared["after"]["num_sequences"])),
            *(_parsed(compared[side]["tau"], ".2f") for side in ("before", "after")),
            _parsed(compared["gain"], "+.2f"),
        )
        for domain, compared in domains.items()
    ]
    columns = ("domain", "prompts", "τ before", "τ after", "gain")
    times = [(one, f"{on[one]:.1f}", f"{off[one]:.1f}", f"{on[one] / off[one]:.2f}×") for one in domains]
    sides = ("domain", "speculation on", "off", "on / off")
    verdicts = ", ".join(f"{number} {verdict}" for verdict, number in result["outputs"]["verdicts"].items())
    return told | {
        "verdicts": f"{result['outputs']['num_compared']} outputs compared with those without speculation: {verdicts}",
        "requests": ", ".join(f"{number} {status}" for status, number in result["requests"].items()),
        "table": Table("Held-out prompts before and after the swap, 95% intervals", columns, rows, {1, 2, 3, 4}),
        "times": Table("Tokens a second of one stream", sides, times, {1, 2, 3}),
        "speed": Figure(chart, "The same prompts, each once with and once without speculation, in turn."),
    }


def _versions(found: Findings) -> Table:
    seen = {draft.version: draft for draft in found.state.drafts}
    rows = [
        (
            str(version.number),
            _status(version, draft.champion),
            _at(version.created_ms),
            draft.parent or NONE,
            draft.rows or draft.returns or NONE,
            version.lineage.gate or "none",
            taus_in_words(draft.tau) or NONE,
        )
        for version, draft in ((version, seen[version.number]) for version in found.drafts)
    ]
    columns = ("draft", "status", "registered (UTC)", "parent", "rows", "gate", "τ, held out")
    return Table("Drafts in the registry, newest first", columns, rows, {0, 3, 4})


def _status(version: Version, champion: bool) -> str:
    before = "was champion" if version.was_champion else "never promoted"
    return "quarantined" if version.quarantined else "champion" if champion else before


def _lineage(version: Version) -> Table:
    since = {"forced": version.forced, "quarantined": version.quarantined}
    told = {**version.lineage.to_tags(), "sha256": version.sha256, **{name: why for name, why in since.items() if why}}
    if version.was_champion:
        told["previous"] = str(version.previous or "")
    rows = [(label, told[name] or "does not apply") for name, label in LINEAGE_LABELS.items() if name in told]
    return Table(f"Lineage of draft {version.number}", ("what", "value"), rows)


def _gate(version: Version, report: GateReport | None) -> dict[str, Any]:
    told: dict[str, Any] = {
        "number": version.number,
        "verdict": version.lineage.gate or "none",
        "quarantined": version.quarantined,
        "forced": version.forced,
        "reasons": version.lineage.gate_reasons,
        "report": report,
    }
    if report is None:
        return told
    columns, rows = evidence_table(report)
    numeric = {number for number, column in enumerate(columns) if number and column != "verdict"}
    figure = None
    title = f"Change of τ by domain, draft {version.number} against the best before it"
    if report.test is not None and (chart := change_chart(f"gate-{version.number}", title, report)) is not None:
        caption = f"Each end of a line is a one-sided bound at {report.test.params.confidence:.0%}. "
        figure = Figure(chart, f"{caption}The lower end must not lie below the floor.")
    return told | {
        "why": explain(report),
        "table": Table(f"Evidence on draft {version.number} by domain", columns, rows, numeric),
        "figure": figure,
        "thresholds": {} if report.test is None else thresholds(report.test),
    }


def _log(log: LogStats) -> Table:
    rows = [
        ("rows", f"{log.total:,}"),
        *((f"rows of domain {domain}", f"{count:,}") for domain, count in log.per_domain.items()),
        ("rows waiting for a refresh", f"{log.depth:,}"),
        ("last row trained on", f"{log.cursor:,}" if log.cursor else "none yet"),
        ("rows dropped", f"{log.dropped:,}"),
        ("duplicate rows, not kept", f"{log.duplicates:,}"),
        ("size on disk", f"{log.bytes / 2**20:,.1f} MiB"),
    ]
    return Table("Query log", ("what", "count"), rows, {1})


def _parsed(dumped: Mapping[str, float] | None, form: str) -> str:
    return NONE if dumped is None else Estimate(**dumped).text(form)


def _at(time_ms: float) -> str:
    return _when(datetime.fromtimestamp(time_ms / 1000, UTC))


def _when(moment: datetime) -> str:
    return f"{moment:%Y-%m-%d %H:%M}"
