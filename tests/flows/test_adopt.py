"""Drafts from elsewhere, through the command line, with the answers of a finished build."""

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from sqlalchemy import delete

from infra.artifacts import check_manifest
from infra.database import Database
from infra.tables import champions
from models.drafts import eagle3
from tests.conftest import shake
from tests.flows.conftest import registry_of
from tests.models.published import published

pytestmark = pytest.mark.engine


@pytest.fixture
def home(built, tmp_path: Path) -> Path:
    """Return a home with everything of a build but its registry, so that nothing is served."""
    home = tmp_path / "home"
    shutil.copytree(built[0].home, home, ignore=shutil.ignore_patterns("mlflow.db*", "cache"))
    with Database(home / "queries.db").writing() as connection:
        connection.execute(delete(champions))
    return home


@pytest.fixture
def target(built, tmp_path: Path) -> Path:
    return registry_of(built[0].home).download(registry_of(built[0].home).get("target", 1), tmp_path / "fetched")


@pytest.fixture
def trained(built, target: Path, tmp_path: Path) -> Path:
    """Return nearly the build's own draft, as somebody else would publish it."""
    registry = registry_of(built[0].home)
    head = eagle3.load(registry.download(registry.get("draft", 1), tmp_path / "fetched"), target)
    shake(head, 1e-3, seed=0)
    ours = tmp_path / "nearly"
    ours.mkdir()
    eagle3.save(head, ours)
    return published(ours, target, tmp_path / "trained", "speculators")


@pytest.fixture
def noise(target: Path, tmp_path: Path) -> Callable[[int], Path]:
    """Return what publishes a head that drafts badly, and was made for shorter texts than the target."""

    def make(seed: int) -> Path:
        head = eagle3.create(eagle3.Params(vocab_size=128), target, np.arange(259))
        shake(head, 0.3, seed)
        ours = tmp_path / f"ours{seed}"
        ours.mkdir()
        eagle3.save(head, ours)
        short = {"max_position_embeddings": 512}
        return published(ours, target, tmp_path / f"noise{seed}", "native", lambda config, _: config.update(short))

    return make


def test_the_first_draft_is_served_a_better_one_passes_the_gate_and_a_worse_one_does_not(
    home: Path, trained: Path, noise: Callable[[int], Path], cli_in, tmp_path: Path
) -> None:
    cli, registry = cli_in(home), registry_of(home)
    output = cli.run("import-draft", str(noise(1)), "--recipe", "tiny")
    assert "promoted: draft 1, τ chat 1." in output
    assert "its files say that it was made for 512 tokens" in output
    assert registry.champion("target").number == registry.champion("draft").number == 1
    first = registry.get("draft", 1)
    assert (first.lineage.parent, first.lineage.gate, first.lineage.source) == (None, None, str(tmp_path / "noise1"))
    assert float(first.tags["golden_tau"]) >= 1

    output = cli.run("import-draft", str(trained), "--recipe", "tiny")
    assert "registered: draft 2" in output
    assert "add --promote" in output and "made for" not in output
    assert registry.champion("draft").number == 1

    output = cli.run("import-draft", str(trained), "--recipe", "tiny", "--promote")
    assert "promoted: draft 3" in output
    third = registry.champion("draft")
    assert third.number == 3
    assert (third.tags["gate"], third.tags["gated_against"], third.tags["gate_test"]) == ("passed", "1", "1")
    assert (third.lineage.parent, third.tags["line"]) == (None, first.tags["line"])
    assert third.tags["source_sha256"] == registry.get("draft", 2).tags["source_sha256"]
    check_manifest(registry.download(third, tmp_path / "again"))

    assert "already trained: draft 3" in cli.run("import-draft", str(trained), "--recipe", "tiny", "--promote")
    output = cli.run("import-draft", str(noise(2)), "--recipe", "tiny", "--promote")
    assert "refused: draft 4" in output
    assert "no gain shown" in output or "a loss is shown" in output
    fourth = registry.get("draft", 4)
    assert (fourth.tags["gate"], fourth.tags["gated_against"], fourth.tags["gate_test"]) == ("refused", "3", "1")
    assert "draft 3 stays: it came from" in cli.run("build", "--recipe", "tiny")
    assert registry.champion("draft").number == 3
