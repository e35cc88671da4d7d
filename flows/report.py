"""Gather what `redraft report` tells, and write it."""

import json
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from flows.overview import overview
from infra.artifacts import write_whole
from infra.querylog import QueryLog
from infra.registry import Registry, Version
from infra.settings import Settings
from tasks.gate_report import DATA, GateReport
from tasks.lineage import git_commit
from tasks.report import MAX_GATES, Demonstration, Findings, page
from tasks.served import from_answers, from_log

REPORT = "report.html"
MAX_ROWS = 5000
# What flows/demo.py leaves in its folder.
DEMO_RESULT = "result.json"
DEMO_PHASES = ("before", "traffic", "meanwhile", "after")


def write_report(settings: Settings, output: Path | None = None) -> Path:
    """Write the page and return its file.

    Args:
        settings: whose home the page is about.
        output: the file; by default report.html in the home folder.

    Raises:
        ValueError: the file can't be written there, or the service answers something else.
        ConnectionError: the registry can't be asked.
    """
    file = output or settings.home / REPORT
    write_whole(file, page(collect(settings)))
    return file


def collect(settings: Settings) -> Findings:
    """Ask the registry, the query log, the service and the demonstrations' folders.

    Raises:
        ValueError: the service answers something else.
        ConnectionError: the registry can't be asked.
    """
    registry = Registry(settings.mlflow_uri, settings.artifacts / "mlflow")
    drafts = registry.versions("draft")
    rows = QueryLog(settings.querylog).latest(MAX_ROWS)
    return Findings(
        state=overview(settings),
        target=registry.champion("target"),
        drafts=drafts,
        gates=_gates(registry, drafts[:MAX_GATES]),
        served=from_log(rows),
        num_rows=len(rows),
        demonstrations=[_demonstration(folder) for folder in sorted((settings.home / "demo").glob("*/"))],
        written=datetime.now(UTC),
        commit=git_commit(),
    )


def _gates(registry: Registry, drafts: list[Version]) -> dict[int, GateReport]:
    texts = {version.number: registry.attached(version, DATA) for version in drafts}
    return {number: GateReport.model_validate_json(text) for number, text in texts.items() if text is not None}


def _demonstration(folder: Path) -> Demonstration:
    result = folder / DEMO_RESULT
    answers = [row for phase in DEMO_PHASES for row in answers_of(folder / f"{phase}.jsonl")]
    return Demonstration(
        name=folder.name,
        result=json.loads(result.read_text()) if result.is_file() else None,
        served=from_answers(answers),
    )


def answers_of(file: Path) -> list[dict[str, Any]]:
    """Return a phase's answers, in the order they ended; one that a kill cut short is not there."""
    rows = []
    for line in file.read_text().splitlines() if file.is_file() else ():
        with suppress(ValueError):
            rows.append(json.loads(line))
    return rows
