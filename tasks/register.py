"""Put targets and drafts into the registry, with all that is known of them. Nothing is served by that alone."""

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from infra.artifacts import Artifact, open_artifact, stored
from infra.machine import git_commit
from infra.registry import Registry, open_registry
from infra.versions import Lineage, Pair, Target, TrainedWindow, Version, ancestors, same_files
from infra.views.charts import draw_tau
from infra.views.gate import headline, write_files
from infra.windows import Window
from models.core.drafting.draft_families import check_draft
from models.recipe import Recipe
from models.targets import TargetCard, describe
from models.types import Estimate, Frozen, GateReport, Kind
from tasks.distill_draft import Trained, forget_states, teachers_in, trained_context
from tasks.find_challenger import EVIDENCE, Past, Start
from tasks.gate_draft import GateResult
from tasks.measure_draft import Measured, first_report
from tasks.promote import MADE_BY
from tasks.stages import flow_run_id, run_logger, task


class Adopted(Frozen):
    """A draft from elsewhere: as it is served, and where it came from.

    Attributes:
        draft: kind "draft", as the engine loads it.
        source_sha256: of the files of directory `source` that count.
        source_layers: how many of its first layers were taken, None for all that it is.
        source_reading: what was measured to be right where its files leave something open, "" where they don't.
        trained_context: tokens that its files say it was made for, where that is less than the target reads.
    """

    draft: Artifact
    source: str
    source_sha256: str
    source_layers: int | None = None
    source_reading: str = ""
    trained_context: int | None = None


@task
def register_target(recipe: Recipe, target: Artifact) -> Version:
    """Return the target's version, a new one unless the same files are registered already.

    It is tagged with all that recipes made it by, so that `require_target` knows those again.
    """
    registry, made_by = open_registry(), recipe.target_tables
    for found in same_files(registry.versions("target"), target)[:1]:
        if made_by not in (known := json.loads(found.tags.get(MADE_BY, "[]"))):
            registry.tag(found, MADE_BY, json.dumps([*known, made_by]))
        return found
    tags = {**identity(describe(target.path)).to_tags(), "flow_run": flow_run_id(), MADE_BY: json.dumps([made_by])}
    return _register(registry, "target", target, tags, {})


@task
def register_draft(
    recipe: Recipe,
    target: Version,
    target_files: Artifact,
    draft: Artifact,
    samples: Artifact,
    measured: Measured,
    adopted: Adopted | None = None,
) -> Version:
    """Return the version of a draft that was trained from nothing, or elsewhere and not yet gated: a line's first."""
    registry = open_registry()
    for found in same_files(registry.versions("draft"), draft):
        if found.lineage.target_version == target.number:
            return found
    if adopted is None:
        origin = {"teachers": teachers_in(recipe.distill), "trained_context": trained_context(draft)}
    else:
        origin = adopted.model_dump(exclude={"draft"})
    known = {**_figures(measured), **origin, "line": draft.sha256[:16], "gate": None}
    lineage = _lineage(recipe, target, target_files, draft, None, samples, known)
    report = first_report(measured, recipe.num_draft_tokens)
    return _register(registry, "draft", draft, lineage.to_tags(), measured.metrics(), report)


@task
def register_gated(recipe: Recipe, pair: Pair, adopted: Adopted, samples: Artifact, gated: GateResult) -> Version:
    """Register a draft that was trained elsewhere, with the gate's verdict on it and the champion.

    It has no parent, but it is of the champion's line, because it was one of that champion's challengers.
    """
    champion = pair.draft
    line = {"gated_against": champion.number, "line": champion.lineage.line}
    known = {**_verdict(gated), **adopted.model_dump(exclude={"draft"}), **line}
    lineage = _lineage(recipe, pair.target, pair.target_files, adopted.draft, None, samples, known)
    return _register_gated(adopted.draft, lineage, gated.origin(champion.number), gated)


@task
def register_returned(recipe: Recipe, pair: Pair, past: Past, gated: GateResult) -> Version:
    """Register a past champion once more, with the gate's verdict on its return; a refused one was a challenger too.

    It is a version of its own, because the old one's tags tell of its own time: whom it was gated against then, and
    whom it replaced, which is the way back from there. A quarantine of this one is not the old one's, but keeps its
    files out of the pool.
    """
    old = past.version.lineage
    changed = {
        "parent": past.version.number,
        "continues": None,
        "window": None,
        "flow_run": flow_run_id(),
        "gated_against": pair.draft.number,
        "returns_for": past.domain,
        **_verdict(gated),
        "gate_data": old.gate_data,
        "unlike": old.unlike,
    }
    lineage = old.model_copy(update=changed)
    report = gated.origin(pair.draft.number, returns=past.version.number)
    version = _register_gated(past.files, lineage, report, gated)
    run_logger().info("draft %d, %s: %s", version.number, gated.report.verdict, lineage.returns)
    return version


@task
def register_candidate(
    recipe: Recipe, pair: Pair, start: Start, trained: Trained, window: Window, samples: Artifact, gated: GateResult
) -> Version:
    """Register what a refresh trained, with the gate's verdict; a refused one too: it was one of the challengers.

    This is the commit of weights, optimizer state and evidence at once: what a run before this one left beside it is
    found by no one.
    """
    registry, parent = open_registry(), pair.draft
    state = None if trained.state is None else stored(trained.state)
    learnt, own = start.version.lineage.trained_context, trained_context(trained.draft)
    known = {
        **_verdict(gated),
        "line": parent.lineage.line,
        "parent": parent.number,
        "window": TrainedWindow(
            first_seq=window.first_seq, last_seq=window.last_seq, sha256=window.sha256, uri=samples.uri
        ),
        "continues": None if start.version.number == parent.number else start.version.number,
        "teachers": teachers_in(recipe.refresh_distill()),
        "trained_context": None if learnt is None else max(learnt, own or 0),
        **({} if state is None else {"state_uri": state.uri, "state_sha256": state.sha256}),
    }
    first, like = first_samples(parent), pair.draft_files.path
    lineage = _lineage(recipe, pair.target, pair.target_files, trained.draft, like, first, known)
    version = _register_gated(trained.draft, lineage, gated.origin(parent.number, window, lineage.continues), gated)
    _record_curve(registry, version)
    before = None if parent.previous is None else registry.get("draft", parent.previous)
    forget_states({one.lineage.state_uri for one in (version, parent, before) if one is not None})
    return version


def first_samples(version: Version) -> Artifact:
    """Return the samples that a draft's line started with."""
    return Artifact(uri=version.lineage.samples_uri, sha256=version.lineage.samples_sha256, kind="samples")


def identity(card: TargetCard) -> Target:
    """Return what tells a target from others."""
    return Target.model_validate(card, from_attributes=True)


def _lineage(
    recipe: Recipe,
    target: Version,
    target_files: Artifact,
    draft: Artifact,
    like: Path | None,
    samples: Artifact,
    known: Mapping[str, Any],
) -> Lineage:
    """Check a draft of this run, and return its lineage: its line, its figures and whatever else is known of it."""
    card, samples = describe(target_files.path), stored(samples)
    check_draft(open_artifact(draft), like, card)
    common: dict[str, Any] = {
        "target": identity(card),
        "target_version": target.number,
        "parent": None,
        "window": None,
        "sampling": {"max_tokens": recipe.generate.max_tokens, "temperature": 0.0},
        "quantization": recipe.quantize.method.name if recipe.quantize else "",
        "git_commit": git_commit(),
        "flow_run": flow_run_id(),
        "num_draft_tokens": recipe.num_draft_tokens,
        "samples_uri": samples.uri,
        "samples_sha256": samples.sha256,
        "seed": recipe.seed,
    }
    return Lineage(**{**common, **known})


def _figures(measured: Measured) -> dict[str, Any]:
    coverage = {domain: round(share, 4) for domain, share in measured.coverage.items()}
    return {"tau": _rounded(measured.tau), "coverage": coverage, "golden_tau": round(measured.golden_tau, 4)}


def _verdict(gated: GateResult) -> dict[str, Any]:
    return {
        **_figures(gated.measured),
        "gate": gated.report.verdict,
        "gate_reasons": "; ".join(gated.report.reasons),
        "gate_test": gated.test.test_index,
        "regression_sets": gated.regression_sets,
        "gate_data": gated.gate_data,
        "unlike": _rounded(gated.unlike),
    }


def _rounded(tau: Mapping[str, Estimate]) -> dict[str, float]:
    return {domain: round(found.value, 4) for domain, found in tau.items()}


def _register_gated(draft: Artifact, lineage: Lineage, report: GateReport, gated: GateResult) -> Version:
    metrics = gated.measured.metrics() | {
        "gate/gain": gated.test.gain.value,
        "gate/gain_low": gated.test.gain.low,
        **{f"parent_tau/{name}": one.tau_before for name, one in report.domains.items() if one.tau_before is not None},
    }
    return _register(open_registry(), "draft", draft, lineage.to_tags(), metrics, report, gated)


def _register(
    registry: Registry,
    kind: Kind,
    artifact: Artifact,
    tags: Mapping[str, str],
    metrics: Mapping[str, float],
    report: GateReport | None = None,
    gated: GateResult | None = None,
) -> Version:
    with tempfile.TemporaryDirectory() as folder:
        files = [] if report is None else write_files(report, Path(folder))
        if gated is not None:
            files.append(Path(folder) / EVIDENCE)
            files[-1].write_text(gated.evidence.model_dump_json(), encoding="utf-8")
        description = "" if report is None else headline(report)
        in_place = kind == "target"  # too large for a copy
        version = registry.register(kind, open_artifact(artifact), tags, metrics, files, description, in_place)
    run_logger().info("registered %s %d", kind, version.number)
    return version


def _record_curve(registry: Registry, version: Version) -> None:
    """Draw τ over the version's line; each point was measured on the conversations of its own time."""
    curves: dict[str, list[tuple[int, float]]] = {}
    for one in reversed(ancestors(registry, version)):
        for domain, tau in one.lineage.tau.items():
            curves.setdefault(domain, []).append((one.number, tau))
    with tempfile.TemporaryDirectory() as folder:
        file = draw_tau(curves, Path(folder) / "tau.svg")
        registry.store.record_run(f"draft {version.number}", {"gate": version.lineage.gate or ""}, {}, [file])
