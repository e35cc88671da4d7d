"""Gather what the report tells, and write it."""

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

from infra.files import write_atomic
from infra.machine import git_commit
from infra.overview import REPORT, overview
from infra.querylog import QueryLog
from infra.registry import open_registry
from infra.settings import Settings
from infra.views.acceptance import Acceptance, Group, Served, by_domain_and_draft, from_answers, from_log
from infra.views.gate import DATA
from infra.views.report import MAX_GATES, Demonstration, Findings, page
from models.core.evaluation.acceptance import Trace, summarise
from models.types import GateReport
from tasks.measure.cells import PHASES, RESULT, answers_of
from tasks.stages import task

MAX_ROWS = 5000


@task
def write_report(settings: Settings, output: Path | None = None) -> Path:
    """Write the page, by default into report.html in the home folder, and return its file.

    Raises:
        ValueError: the file can't be written there, or the service answers something else.
        ConnectionError: the registry can't be asked.
    """
    file = output or settings.home / REPORT
    write_atomic(file, page(collect(settings)))
    return file


def collect(settings: Settings) -> Findings:
    """Ask the registry, the query log, the service and the demonstrations' folders."""
    registry = open_registry(settings)
    drafts = registry.versions("draft")
    gates = {version.number: registry.attached(version, DATA) for version in drafts[:MAX_GATES]}
    rows = QueryLog(settings.querylog).latest(MAX_ROWS)
    return Findings(
        state=overview(settings),
        drafts=drafts,
        gates={number: GateReport.model_validate_json(text) for number, text in gates.items() if text is not None},
        acceptance=_acceptance(from_log(rows)),
        num_rows=len(rows),
        demonstrations=[_demonstration(folder) for folder in sorted((settings.home / "demo").glob("*/"))],
        written=datetime.now(UTC),
        commit=git_commit(),
    )


def _demonstration(folder: Path) -> Demonstration:
    result = folder / RESULT
    answers = [row for phase in PHASES for row in answers_of(folder, phase)]
    return Demonstration(
        name=folder.name,
        result=json.loads(result.read_text()) if result.is_file() else None,
        acceptance=_acceptance(from_answers(answers)),
    )


def _acceptance(served: Sequence[Served]) -> Acceptance:
    grouped = by_domain_and_draft(served)
    return Acceptance(served, [sum_up(domain, draft, requests) for (domain, draft), requests in grouped.items()])


def sum_up(domain: str, draft: int, requests: Sequence[Served]) -> Group:
    """Return the acceptance of one domain's requests that one draft drafted for, with 95% intervals."""
    traces = [  # without tokens: whether an output loops is not asked here
        Trace(request_id=str(number), token_ids=(), drafted=one.drafted, accepted=one.accepted, domain=domain)
        for number, one in enumerate(requests)
    ]
    summary = summarise(traces)
    assert summary.tau is not None  # each request has a step
    times_ms = [request.per_token_ms for request in requests if request.per_token_ms is not None]
    return Group(
        domain=domain,
        draft=draft,
        num_requests=len(requests),
        tau=summary.tau,
        rate=summary.rate,
        per_token_ms=median(times_ms) if times_ms else None,
    )
