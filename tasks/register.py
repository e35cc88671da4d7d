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
from tasks.adopt_draft import Adopted
from tasks.figures import draw_tau
from tasks.gate_draft import Judged
from tasks.gate_report import PASSED, REFUSED, GateReport, first_report, headline, judged_report, write_files
from tasks.lineage import Pair, ancestors, lineage_tags, open_registry, target_tags, taus
from tasks.measure_draft import Measured
from tasks.recipe import Recipe
from tasks.reporting import flow_run_id, run_logger


@task(cache_policy=NO_CACHE)
def register_target(target: Artifact) -> Version:
    """Return the target's version, a new one unless the same files are registered already."""
    registry = open_registry()
    tags = {**target_tags(describe(target.path)), "flow_run": flow_run_id()}
    found = same_files(registry.versions("target"), target)
    return found[0] if found else _register(registry, "target", target, tags, {})


@task(cache_policy=NO_CACHE)
def register_draft(
    recipe: Recipe, target: Version, target_files: Artifact, draft: Artifact, samples: Artifact, measured: Measured
) -> Version:
    """Return the version of a draft that was trained from nothing; it starts a line."""
    return _register_first(recipe, target, target_files, draft, samples, measured, {})


@task(cache_policy=NO_CACHE)
def register_adopted(
    recipe: Recipe, target: Version, target_files: Artifact, adopted: Adopted, samples: Artifact, measured: Measured
) -> Version:
    """Return the version of a draft that was trained elsewhere and not yet judged; it starts a line."""
    return _register_first(recipe, target, target_files, adopted.draft, samples, measured, adopted.tags())


@task(cache_policy=NO_CACHE)
def register_judged(recipe: Recipe, pair: Pair, adopted: Adopted, samples: Artifact, judged: Judged) -> Version:
    """Register a draft that was trained elsewhere, with the gate's verdict on it and the champion.

    It has no parent, but it is of the champion's line, because the test was one of those that share that line's error
    budget.
    """
    registry, card = open_registry(), describe(pair.target_files.path)
    catalog.load("drafts", recipe.draft.name).check(open_artifact(adopted.draft), None, card)
    tags = lineage_tags(
        pair.target,
        card,
        **_recipe_tags(recipe, samples.uri, samples.sha256),
        **adopted.tags(),
        **_verdict_tags(judged),
        line=pair.draft.tags["line"],
        gated_against=str(pair.draft.number),
    )
    report = judged_report(judged, recipe.gate, pair.draft.number, None, recipe.num_draft_tokens)
    return _register(registry, "draft", adopted.draft, tags, _verdict_metrics(judged), report)


@task(cache_policy=NO_CACHE)
def register_candidate(
    recipe: Recipe, pair: Pair, candidate: Artifact, window: Window, window_samples: Artifact, judged: Judged
) -> Version:
    """Register what a refresh trained, with the gate's verdict; a refused one too: it was a test of its line."""
    registry, card = open_registry(), describe(pair.target_files.path)
    catalog.load("drafts", recipe.draft.name).check(open_artifact(candidate), pair.draft_files.path, card)
    parent = pair.draft
    report = judged_report(judged, recipe.gate, parent.number, window, recipe.num_draft_tokens)
    tags = lineage_tags(
        pair.target,
        card,
        **_recipe_tags(recipe, parent.tags["samples_uri"], parent.tags["samples_sha256"]),
        **_verdict_tags(judged),
        parent=str(parent.number),
        line=parent.tags["line"],
        window_first_seq=str(window.first_seq),
        window_last_seq=str(window.last_seq),
        window_sha256=window.sha256,
        window_uri=window_samples.uri,
    )
    version = _register(registry, "draft", candidate, tags, _verdict_metrics(judged), report)
    _record_curve(registry, version)
    return version


def first_samples(version: Version) -> Artifact:
    """Return the samples that a draft's line started with."""
    return Artifact(uri=version.tags["samples_uri"], sha256=version.tags["samples_sha256"], kind="samples")


def _recipe_tags(recipe: Recipe, uri: str, sha256: str) -> dict[str, str]:
    sampling = {"max_tokens": recipe.generate.max_tokens, "temperature": 0.0}
    return {
        "samples_uri": uri,
        "samples_sha256": sha256,
        "sampling": json.dumps(sampling),
        "quantization": recipe.quantize.method.name if recipe.quantize else "",
        "seed": str(recipe.seed),
    }


def same_files(versions: Sequence[Version], artifact: Artifact) -> list[Version]:
    """Return the versions that hold an artifact's files and may be served, in the order given."""
    return [one for one in versions if one.sha256 == artifact.sha256 and not is_quarantined(one)]


def _register_first(
    recipe: Recipe,
    target: Version,
    target_files: Artifact,
    draft: Artifact,
    samples: Artifact,
    measured: Measured,
    source_tags: Mapping[str, str],
) -> Version:
    registry = open_registry()
    for found in same_files(registry.versions("draft"), draft):
        if found.tags["target_version"] == str(target.number):
            return found
    card = describe(target_files.path)
    catalog.load("drafts", recipe.draft.name).check(open_artifact(draft), None, card)
    tags = lineage_tags(
        target,
        card,
        **_recipe_tags(recipe, samples.uri, samples.sha256),
        **measured.tags(),
        **source_tags,
        line=draft.sha256[:16],
        gate_test="0",
    )
    report = first_report(measured, recipe.num_draft_tokens)
    return _register(registry, "draft", draft, tags, measured.metrics(), report)


def _verdict_tags(judged: Judged) -> dict[str, str]:
    verdict = judged.verdict
    return {
        **judged.measured.tags(),
        "gate": PASSED if verdict.promote else REFUSED,
        "gate_reasons": "; ".join(verdict.reasons),
        "gate_test": str(judged.test_index),
    }


def _verdict_metrics(judged: Judged) -> dict[str, float]:
    return judged.measured.metrics() | {
        "gate/gain": judged.verdict.overall.value,
        "gate/gain_low": judged.verdict.overall.low,
        **{f"parent_tau/{domain}": tau for domain, tau in judged.parent_tau.items()},
    }


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
        registry.store.record_run(f"draft {version.number}", {"gate": version.tags["gate"]}, {}, [file])
