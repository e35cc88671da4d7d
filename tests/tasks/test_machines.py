"""Machines that share a registry and an object store, and no disk: each has a home of its own, gone when it is left."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from infra.artifacts import publish, staged
from infra.registry import open_registry
from infra.settings import load_settings
from infra.versions import Pair
from models.targets import describe
from tasks.distill_draft import STATE, Trained
from tasks.find_challenger import find_challenger
from tasks.promote import find_champions, promote_build
from tasks.register import first_samples, register_candidate, register_draft, register_target
from tasks.stages.samples import read_samples
from tests.conftest import judge
from tests.object_store import Bucket
from tests.tasks.made import target_files
from tests.tasks.test_register import RECIPE, WINDOW, made, samples_of

pytestmark = pytest.mark.slow
Move = Callable[[str], Path]


@pytest.fixture
def move(store: Path, bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Move:
    """What goes on to a machine of that name with an empty disk, and takes the disk of the one before away."""
    shutil.copy(store, tmp_path / "mlflow.db")
    monkeypatch.setenv("REDRAFT_MLFLOW_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.setenv("REDRAFT_ARTIFACTS", bucket.address)
    disks: list[Path] = []

    def to(name: str) -> Path:
        for disk in disks:
            shutil.rmtree(disk)
        disks[:] = [tmp_path / name]
        disks[0].mkdir()
        monkeypatch.setenv("REDRAFT_HOME", str(disks[0] / "home"))
        return disks[0]

    return to


def build(disk: Path, tiny_target: Path) -> None:
    target = target_files(tiny_target, disk / "target")
    version = register_target.fn(RECIPE, target)
    draft, measured = made(target.path, disk / "first", seed=1), judge({"chat": 0.0}).measured
    promote_build.fn(version, register_draft.fn(RECIPE, version, target, draft, samples_of(disk), measured))


def train(disk: Path, pair: Pair) -> Trained:
    end = load_settings().local_artifacts / STATE / "end"
    with staged(end) as directory:
        (directory / "state").write_text("momentum")
    return Trained(draft=made(pair.target_files.path, disk / "candidate", seed=2), state=publish(end, STATE))


def champions() -> Pair:
    pair = find_champions.fn()
    assert pair is not None
    return pair


def test_a_refresh_runs_where_no_disk_is_shared_with_the_build_nor_with_the_service(
    move: Move, tiny_target: Path
) -> None:
    build(move("builder"), tiny_target)
    disk, pair = move("worker"), champions()
    assert pair.target_files.path.is_relative_to(disk)
    assert describe(pair.target_files.path).sha256 == pair.target.target.sha256
    first = read_samples(first_samples(pair.draft), "train")
    assert [len(sample.token_ids) for sample in first] == [8]
    start = find_challenger.fn(RECIPE, pair, WINDOW)
    gates = judge({"chat": 0.0})  # undecided: the next refresh goes on from it
    candidate = register_candidate.fn(RECIPE, pair, start, train(disk, pair), WINDOW, samples_of(disk), gates)
    move("another worker")
    start = find_challenger.fn(RECIPE, champions(), WINDOW.model_copy(update={"first_seq": 61, "last_seq": 90}))
    assert start.version.number == candidate.number
    assert start.state is not None
    open_registry().promote("draft", candidate.number)
    disk = move("service")
    served = open_registry().download(champions().draft, load_settings().cache)
    assert served.is_relative_to(disk)


def test_states_that_no_run_goes_on_from_leave_the_object_store(move: Move, bucket: Bucket, tiny_target: Path) -> None:
    build(move("builder"), tiny_target)
    disk, pair = move("worker"), champions()
    start, kept = find_challenger.fn(RECIPE, pair, WINDOW), set[str]()
    for _ in range(2):
        gates, trained = judge({"chat": 0.0}), train(disk, pair)
        candidate = register_candidate.fn(RECIPE, pair, start, trained, WINDOW, samples_of(disk), gates)
        kept.add(candidate.lineage.state_uri)
        shutil.rmtree(disk / "candidate")
    states = {name.rpartition("/")[0] for name in bucket.names() if name.startswith(STATE)}
    assert {f"{bucket.address}/{name}" for name in states} == kept == {candidate.lineage.state_uri}
