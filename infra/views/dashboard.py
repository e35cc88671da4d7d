"""One page about one replica: what it drafts with and why, what that gives, and what became of requests.

Here is also what pages are made of. A page loads nothing and runs no script. All text in it is escaped by its template.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from infra.status import ServiceStatus
from infra.views import MEANING, shown
from infra.views.charts import bar_chart
from models.types import MIN_STEPS

TEMPLATE = "dashboard.html"
RELOAD_S = 5


class Card(NamedTuple):
    name: str
    value: str
    note: str


@dataclass(frozen=True)
class Table:
    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    numeric: Collection[int] = ()


@dataclass(frozen=True)
class Figure:
    chart: Markup
    caption: str


TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).parent),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)


def render(template: str, **values: Any) -> str:
    return TEMPLATES.get_template(template).render(**values)


def dashboard(status: ServiceStatus, now: datetime) -> str:
    """Return the page as HTML; it loads itself again every RELOAD_S seconds."""
    return render(
        TEMPLATE,
        reload_s=RELOAD_S,
        name=status.served_name,
        draft=_draft(status),
        uptime=str(timedelta(seconds=round(status.uptime_s))),
        seen=now.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S"),
        meaning=MEANING,
        min_steps=MIN_STEPS,
        shown_cards=_cards(status),
        serving=Table("What serves, and why", ("what", "now"), told_of(status)),
        speed=_speed(status),
        acceptance=_acceptance(status),
        counts=Table("Counts", ("what", "since the start"), _counts(status)),
    )


def told_of(status: ServiceStatus) -> list[tuple[str, str]]:
    """Return in words what a replica drafts with, what it does not, and why: rows of a table."""
    return [
        ("draft in the engine", f"version {status.draft_version}" if status.draft_version else "none"),
        ("speculation", "on" if status.speculating else f"off: {_why_off(status)}"),
        ("requests answered", _listed(status.requests, "with status") or "none yet"),
        *((f"verdict, {domain}", verdict) for domain, verdict in verdicts(status).items()),
        ("swaps of the draft", f"{status.swaps} since its start"),
        ("canary prompts", status.fault or "found nothing"),
        ("background tasks", ", ".join(f"{name} failed" for name in status.failed_tasks) or "run"),
        ("replica", status.replacement or "needs no replacement"),
        ("drafts it refused", _reasons(status.refused) or "none"),
        ("drafts to be retried", _reasons(status.postponed) or "none"),
    ]


def verdicts(status: ServiceStatus) -> dict[str, str]:
    """Return domain to what speculation gives it, in words; nothing where it is off or steps are not planned."""
    if not status.speculating or status.unplanned is not None:
        return {}
    untold = f"too few steps to tell what speculation gives; it takes {MIN_STEPS}"
    found = {domain: f"{domain}: {untold}" for domain in status.acceptance}
    found |= {domain: f"speculation {speed.verdict(domain)}" for domain, speed in status.speed.items()}
    return dict(sorted(found.items()))


def _cards(status: ServiceStatus) -> list[Card]:
    plan = status.throughput
    drafts = "nothing planned yet" if plan is None else f"{plan.num_draft_tokens} tokens a step: {plan.why}"
    return [
        Card("Draft", _draft(status), f"{status.phase}, the registry names {status.champion or 'none'}"),
        Card("Speculation", "on" if status.speculating else "off", drafts if status.speculating else _why_off(status)),
        Card("In flight", f"{status.in_flight:,}", f"{sum(status.requests.values()):,} answered"),
        Card("Rows logged", f"{status.log.written:,}", f"{status.log.dropped:,} lost"),
    ]


def _draft(status: ServiceStatus) -> str:
    return "none" if status.draft_version is None else str(status.draft_version)


def _why_off(status: ServiceStatus) -> str:
    return status.fallback or "switched off by an operator"


def _speed(status: ServiceStatus) -> tuple[Figure, Table] | None:
    if not status.speed:
        return None
    speeds = status.speed.items()
    told = (
        "Tokens a second of one request without a draft and as it is drafted, for each domain. The table has the same."
    )
    bars = {
        domain: {"without a draft": speed.plain_tokens_per_s, "as drafted": speed.tokens_per_s}
        for domain, speed in speeds
    }
    chart = bar_chart("speed", "Speed of one request, by domain", told, bars, "tokens a second")
    rows = [
        (domain, f"{speed.plain_tokens_per_s:.1f}", f"{speed.tokens_per_s:.1f}", speed.gain) for domain, speed in speeds
    ]
    columns = ("domain", "without a draft", "as drafted", "gain")
    caption = "From the times of steps; without a draft, from what plain steps take. Gains have a 95% interval."
    return Figure(chart, caption), Table("Speed of one request, tokens a second", columns, rows, {1, 2, 3})


def _acceptance(status: ServiceStatus) -> Table:
    rows = [
        (domain, f"{one.requests:,}", f"{one.mean_accepted_length:.2f}", shown(one.acceptance_rate, ".1%"))
        for domain, one in status.acceptance.items()
    ]
    columns = ("domain", "requests", "τ", "acceptance rate")
    return Table("The last requests that the present draft drafted alone, by domain", columns, rows, {1, 2, 3})


def _counts(status: ServiceStatus) -> list[tuple[str, str]]:
    rows, events = (f": {one.last_error}" if one.last_error is not None else "" for one in (status.log, status.events))
    return [
        ("tokens served", f"{status.tokens:,}"),
        ("last swap of the draft", "none yet" if status.swap_ms is None else f"{status.swap_ms:.0f} ms"),
        ("rows of the query log", f"{status.log.written:,} written, {status.log.dropped:,} lost{rows}"),
        ("events for the orchestrator", f"{status.events.sent:,} sent, {status.events.dropped:,} lost{events}"),
        ("requests whose states were kept", _listed(status.captured) or "none"),
        ("the loop that follows the registry", _listed(status.reconciler) or "nothing yet"),
    ]


def _listed(numbers: Mapping[str, int], joint: str = "") -> str:
    return ", ".join(f"{number:,} {f'{joint} {name}'.strip()}" for name, number in numbers.items())


def _reasons(drafts: Mapping[str, str]) -> str:
    return "; ".join(f"{name}: {reason}" for name, reason in drafts.items())
