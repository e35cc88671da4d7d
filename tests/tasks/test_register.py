"""What MLflow shows of a registered draft: verdict, evidence and where that lies."""

import shutil
from pathlib import Path

import pytest

from infra.artifacts import Artifact, publish
from infra.manifest import write_manifest
from infra.registry import Pair, Registry, Version, open_registry
from infra.views.gate import DATA, PAGE, GateReport
from infra.windows import Window
from models.recipe import load_recipe
from tasks.register import register_candidate, register_draft, register_target
from tests.conftest import judge, make_draft

SAMPLES = Artifact(uri="file:///nowhere", sha256="0" * 64, kind="samples")
WINDOW = Window(first_seq=1, last_seq=60, num_rows=60, sha256="1" * 64, owner="anyone")
RECIPE = load_recipe("tiny")


@pytest.fixture
def registry(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Registry:
    (tmp_path / "home").mkdir()
    shutil.copy(store, tmp_path / "home")
    monkeypatch.setenv("REDRAFT_HOME", str(tmp_path / "home"))
    return open_registry()


@pytest.fixture
def pair(registry: Registry, tiny_target: Path, tmp_path: Path) -> Pair:
    """Return a registered target and first draft."""
    shutil.copytree(tiny_target, tmp_path / "target")
    write_manifest(tmp_path / "target")
    target_files = publish(tmp_path / "target", "target")
    draft_files = made(tiny_target, tmp_path / "first", seed=1)
    target = register_target.fn(target_files)
    measured = judge({"chat": 0.0}).measured
    draft = register_draft.fn(RECIPE, target, target_files, draft_files, SAMPLES, measured)
    return Pair(target=target, draft=draft, target_files=target_files, draft_files=draft_files)


def made(target: Path, directory: Path, seed: int) -> Artifact:
    directory.mkdir()
    return publish(make_draft(target, directory, seed), "draft")


def register(pair: Pair, tmp_path: Path, gains: dict[str, float]) -> Version:
    candidate = made(pair.target_files.path, tmp_path / "candidate", seed=2)
    return register_candidate.fn(RECIPE, pair, candidate, WINDOW, SAMPLES, judge(gains))


def described(registry: Registry, version: Version) -> str:
    """Return the description as MLflow shows it."""
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=registry.store.uri, registry_uri=registry.store.uri)
    return client.get_model_version(version.kind, str(version.number)).description


@pytest.mark.parametrize(
    ("gains", "verdict", "line"),
    [
        ({"chat": 0.3}, "passed", "Gate passed: +0.300 tokens a step against draft 1, at least"),
        ({"chat": 0.6, "code": -0.3}, "refused", 'Gate refused: domain "code" may lose'),
    ],
)
def test_a_judged_draft_carries_its_verdict_and_evidence(
    registry: Registry, pair: Pair, tmp_path: Path, gains: dict[str, float], verdict: str, line: str
) -> None:
    version = register(pair, tmp_path, gains)
    assert version.tags["gate"] == verdict
    assert version.tags["seed"] == str(RECIPE.seed)
    assert version.tags["num_draft_tokens"] == str(RECIPE.num_draft_tokens)
    description = described(registry, version)
    assert description.startswith(line)
    for name in ("gate.md", "gate.json", "gate.png"):
        assert f"/{name}" in description
    report = GateReport.model_validate_json(registry.attached(version, DATA))
    assert report.verdict == verdict
    assert report.test is not None
    assert (report.test.parent, report.test.rows) == (1, (1, 60))
    assert "; ".join(report.reasons) == version.tags["gate_reasons"]
    assert registry.attached(version, PAGE).startswith(f"# Gate {verdict}")


def test_a_first_draft_says_that_there_was_no_champion(registry: Registry, pair: Pair) -> None:
    assert pair.draft.tags["gate"] == ""
    assert described(registry, pair.draft).startswith("No gate: the first draft of its line")
    assert "There was no champion to compare it with" in registry.attached(pair.draft, PAGE)
    assert described(registry, pair.target) == ""
