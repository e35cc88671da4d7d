"""Put targets and drafts into the registry, with all that is known of them. Nothing is served by that alone."""

import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from prefect import task
from prefect.cache_policies import NO_CACHE

from infra.artifacts import Artifact, open_artifact
from infra.querylog import Window
from infra.registry import Registry, Version, is_quarantined
from models import catalog
from models.targets import describe
from tasks.figures import draw_tau
from tasks.gate_draft import Judged
from tasks.gate_report import GateReport, first_report, headline, judged_report, write_files
from tasks.lineage import Pair, ancestors, lineage_tags, open_registry, target_tags, taus
from tasks.measure_draft import Measured
from tasks.recipe import Recipe
from tasks.reporting import flow_run_id, run_logger


@task(cache_policy=NO_CACHE)
def register_target(target: Artifact) -> Version:
    """Return the target's version, a new one unless the same files are registered already."""
    registry = open_registry()
    tags = {**target_tags(describe(target.path)), "flow_run": flow_run_id()}
    return _same_files(registry.versions("target"), target) or _register(registry, "target", target, tags, {})


@task(cache_policy=NO_CACHE)
def register_draft(
    recipe: Recipe, target: Version, target_files: Artifact, draft: Artifact, samples: Artifact, measured: Measured
) -> Version:
    """Return the version of a draft that was trained from nothing; it starts a line."""
    registry = open_registry()
    found = _same_files(registry.versions("draft"), draft)
    if found is not None and found.tags["target_version"] == str(target.number):
        return found
    card = describe(target_files.path)
    catalog.load("drafts", recipe.draft.name).check(open_artifact(draft), None, card)
    tags = lineage_tags(
        target,
        card,
        **_samples_tags(recipe, samples.uri, samples.sha256),
        **measured.tags(),
        line=draft.sha256[:16],
        gate_test="0",
    )
    report = first_report(measured, recipe.num_draft_tokens)
    return _register(registry, "draft", draft, tags, measured.metrics(), report)


@task(cache_policy=NO_CACHE)
def register_candidate(
    recipe: Recipe, pair: Pair, candidate: Artifact, window: Window, window_samples: Artifact, judged: Judged
) -> Version:
    """Register what a refresh trained, with the gate's verdict; a refused one too: it was a test of its line."""
    registry, card = open_registry(), describe(pair.target_files.path)
    catalog.load("drafts", recipe.draft.name).check(open_artifact(candidate), pair.draft_files.path, card)
    verdict, parent = judged.verdict, pair.draft
    report = judged_report(judged, recipe.gate, parent.number, window, recipe.num_draft_tokens)
    tags = lineage_tags(
        pair.target,
        card,
        **_samples_tags(recipe, parent.tags["samples_uri"], parent.tags["samples_sha256"]),
        **judged.measured.tags(),
        parent=str(parent.number),
        line=parent.tags["line"],
        window_first_seq=str(window.first_seq),
        window_last_seq=str(window.last_seq),
        window_sha256=window.sha256,
        window_uri=window_samples.uri,
        gate=report.verdict,
        gate_reasons="; ".join(verdict.reasons),
        gate_test=str(judged.test_index),
    )
    metrics = judged.measured.metrics() | {
        "gate/gain": verdict.overall.value,
        "gate/gain_low": verdict.overall.low,
        **{f"parent_tau/{domain}": tau for domain, tau in judged.parent_tau.items()},
    }
    version = _register(registry, "draft", candidate, tags, metrics, report)
    _record_curve(registry, version)
    return version


def first_samples(version: Version) -> Artifact:
    """Return the samples that a draft's line started with."""
    return Artifact(uri=version.tags["samples_uri"], sha256=version.tags["samples_sha256"], kind="samples")


def _samples_tags(recipe: Recipe, uri: str, sha256: str) -> dict[str, str]:
    sampling = {"max_tokens": recipe.generate.max_tokens, "temperature": 0.0}
    return {
        "samples_uri": uri,
        "samples_sha256": sha256,
        "sampling": json.dumps(sampling),
        "seed": str(recipe.seed),
    }


def _same_files(versions: Sequence[Version], artifact: Artifact) -> Version | None:
    return next((one for one in versions if one.sha256 == artifact.sha256 and not is_quarantined(one)), None)


def _register(
    registry: Registry,
    kind: str,
    artifact: Artifact,
    tags: Mapping[str, str],
    metrics: Mapping[str, float],
    report: GateReport | None = None,
) -> Version:
    with tempfile.TemporaryDirectory() as folder:
        files = [] if report is None else write_files(report, Path(folder))
        description = "" if report is None else headline(report)
        version = registry.register(kind, open_artifact(artifact), tags, metrics, files, description)
    run_logger().info("registered %s %d", kind, version.number)
    return version


def _record_curve(registry: Registry, version: Version) -> None:
    """Draw τ over the version's line; each point was measured on the conversations of its own time."""
    curves: dict[str, list[tuple[int, float]]] = {}
    for one in reversed(ancestors(registry, version)):
        for domain, tau in taus(one).items():
            curves.setdefault(domain, []).append((one.number, tau))
    with tempfile.TemporaryDirectory() as folder:
        file = draw_tau(curves, Path(folder) / "tau.png")
        registry.record_run(f"draft {version.number}", {"gate": version.tags["gate"]}, {}, [file])
