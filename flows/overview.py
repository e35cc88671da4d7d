"""What there is and what runs, for `redraft status`."""

import json
from typing import Any

from flows.serving import service_status
from infra.querylog import QueryLog
from infra.registry import Registry, Version
from infra.settings import Settings
from infra.supervisor import read_state


def overview(settings: Settings) -> dict[str, Any]:
    """Return the state of a home folder.

    Returns:
        "drafts" newest first, "last_refresh" or None, "log" counts, "service" as it tells of itself or None, "programs"
        that `redraft up` runs.

    Raises:
        ConnectionError: the registry can't be asked.
    """
    registry = Registry(settings.mlflow_uri, settings.artifacts / "mlflow")
    champion, versions = registry.champion("draft"), registry.versions("draft")
    refreshed = [version for version in versions if version.tags["window_first_seq"]]
    url, service = service_status(settings)
    state = read_state(settings.home)
    return {
        "drafts": [_draft(version, champion) for version in versions],
        "last_refresh": _draft(refreshed[0], champion) if refreshed else None,
        "log": QueryLog(settings.querylog).stats().model_dump(),
        "service": None if service is None else {"url": url, **service},
        "programs": [] if state is None else [program.model_dump() for program in state.programs],
    }


def _draft(version: Version, champion: Version | None) -> dict[str, Any]:
    tags = version.tags
    rows = f"{tags['window_first_seq']}–{tags['window_last_seq']}" if tags["window_first_seq"] else ""
    return {
        "version": version.number,
        "champion": champion is not None and version.number == champion.number,
        "parent": tags["parent"],
        "rows": rows,
        "verdict": "quarantined" if "quarantined" in tags else tags["gate"],
        "reasons": tags.get("quarantined", tags.get("gate_reasons", "")),
        "tau": json.loads(tags.get("tau") or "{}"),
        "target_version": tags["target_version"],
        "created_ms": version.created_ms,
    }
