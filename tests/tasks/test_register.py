"""What MLflow shows of a registered draft: verdict, evidence and where that lies."""

from pathlib import Path

import pytest

from infra.artifacts import Artifact, publish, staged
from infra.registry import Registry
from infra.settings import load_settings
from infra.versions import Pair, Version
from infra.views.gate import DATA, PAGE
from infra.windows import Window
from models.core.learning import distill
from models.core.learning.hidden import Sample
from models.recipe import load_recipe
from models.types import Estimate, GateReport
from tasks.distill_draft import TRAINING, Trained
from tasks.find_challenger import find_challenger
from tasks.register import register_candidate, register_draft, register_target
from tests.conftest import judge, make_draft
from tests.tasks.made import samples_files

STATE = Artifact(uri="file:///gone", sha256="2" * 64, kind="state")
WINDOW = Window(first_seq=1, last_seq=60, num_rows=60, sha256="1" * 64, owner="anyone")
LATER = WINDOW.model_copy(update={"first_seq": 61, "last_seq": 120})
RECIPE = load_recipe("tiny")


@pytest.fixture
def pair(registry: Registry, target: Artifact, tmp_path: Path) -> Pair:
    """Return a registered target and first draft."""
    draft_files = made(target.path, tmp_path / "first", seed=1, num_tokens=40)
    version = register_target.fn(RECIPE, target)
    measured = judge({"chat": 0.0}).measured
    draft = register_draft.fn(RECIPE, version, target, draft_files, samples_of(tmp_path), measured)
    return Pair(target=version, draft=draft, target_files=target, draft_files=draft_files)


def made(target: Path, directory: Path, seed: int, num_tokens: int = 30) -> Artifact:
    """Make a draft that learnt from texts of so many tokens at most."""
    directory.mkdir()
    (directory / TRAINING).write_text(f'{{"trained_context": {num_tokens}}}')
    make_draft(target, directory, seed)
    return publish(directory, "draft")


def samples_of(tmp_path: Path) -> Artifact:
    if not (tmp_path / "samples").exists():
        samples_files(tmp_path / "samples", [Sample("s", "chat", [5] * 4, [6] * 4)])
    return publish(tmp_path / "samples", "samples")


def register(pair: Pair, tmp_path: Path, gains: dict[str, float], num_tokens: int = 30) -> Version:
    files = made(pair.target_files.path, tmp_path / "candidate", 2, num_tokens)
    start = find_challenger.fn(RECIPE, pair, WINDOW)
    trained, samples = Trained(draft=files, state=STATE), samples_of(tmp_path)
    return register_candidate.fn(RECIPE, pair, start, trained, WINDOW, samples, judge(gains))


def described(registry: Registry, version: Version) -> str:
    """Return the description as MLflow shows it."""
    return registry.store.client.get_model_version(version.kind, str(version.number)).description


@pytest.mark.slow
def test_a_draft_says_that_it_was_judged_by_own_answers_because_imported_ones_were_unlike(
    registry: Registry, pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unlike = {"chat": Estimate(value=-1.23456, low=-1.5, high=-1.0)}
    judged = judge({"chat": 0.3}).model_copy(update={"unlike": unlike})
    monkeypatch.setattr(f"{__name__}.judge", lambda gains: judged)
    version = register(pair, tmp_path, {"chat": 0.3})
    assert registry.get("draft", version.number).lineage.unlike == {"chat": -1.2346}
    assert pair.draft.lineage.unlike == {}


@pytest.mark.slow
@pytest.mark.parametrize(("before", "num_tokens", "learnt"), [("40", 30, 40), ("40", 90, 90), ("", 90, None)])
def test_a_draft_says_how_long_the_longest_text_is_that_it_or_its_line_learnt_from_where_that_is_known(
    pair: Pair, tmp_path: Path, before: str, num_tokens: int, learnt: int | None
) -> None:
    assert pair.draft.tags["trained_context"] == "40"
    first = pair.draft.model_copy(update={"tags": pair.draft.tags | {"trained_context": before}})
    later = register(pair.model_copy(update={"draft": first}), tmp_path, {"chat": 0.3}, num_tokens)
    assert later.lineage.trained_context == learnt


@pytest.mark.slow
def test_a_draft_carries_the_teachers_that_it_learnt_from(
    registry: Registry, pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taught = distill.Params(teachers=[{"model": {"name": "random", "seed": 1}, "weight": 0.5}])
    monkeypatch.setattr(f"{__name__}.RECIPE", RECIPE.model_copy(update={"distill": taught}))
    told = {"name": "random-llama-1", "weight": 0.5}
    files = made(pair.target_files.path, tmp_path / "taught", seed=3)
    measured = judge({"chat": 0.0}).measured
    first = register_draft.fn(RECIPE, pair.target, pair.target_files, files, samples_of(tmp_path), measured)
    later = register(pair, tmp_path, {"chat": 0.3})
    assert [list(one.lineage.teachers.values()) for one in (pair.draft, first, later)] == [[], [told], [told]]


@pytest.mark.slow
@pytest.mark.parametrize(("gain", "verdict"), [(0.3, "passed"), (-0.35, "refused")])
def test_a_judged_draft_carries_its_verdict_and_evidence(
    registry: Registry, pair: Pair, tmp_path: Path, gain: float, verdict: str
) -> None:
    version = register(pair, tmp_path, {"chat": gain})
    told = {"gate": verdict, "seed": str(RECIPE.seed), "num_draft_tokens": str(RECIPE.num_draft_tokens)}
    told |= {"state_uri": STATE.uri, "state_sha256": STATE.sha256}
    assert told.items() <= version.tags.items()
    description = described(registry, version)
    assert description.startswith(f"Gate {verdict}: ")
    assert all(f"/{name}" in description for name in ("gate.md", "gate.json", "gate.svg"))
    report = GateReport.model_validate_json(registry.attached(version, DATA))
    assert (report.verdict, report.test.parent, report.test.rows) == (verdict, 1, (1, 60))
    assert "; ".join(report.reasons) == version.lineage.gate_reasons
    assert registry.attached(version, PAGE).startswith(f"# Gate {verdict}")
    assert described(registry, pair.draft).startswith("No gate: the first draft of its line")


@pytest.mark.slow
def test_what_is_undecided_is_gone_on_with_and_what_is_shown_worse_is_not(
    registry: Registry, pair: Pair, tmp_path: Path
) -> None:
    assert register(pair, tmp_path, {"chat": 0.0}).number == 2
    again = find_challenger.fn(RECIPE, pair, WINDOW)
    assert (again.version.number, again.evidence.num_windows) == (1, 0)  # the same rows, of which some were erased
    start = find_challenger.fn(RECIPE, pair, LATER)
    assert (start.version.number, start.evidence.num_windows) == (2, 1)
    assert start.evidence.challenger == 1
    assert start.state is None  # the file is not there any more

    registry.quarantine("draft", 2, "another output")
    start = find_challenger.fn(RECIPE, pair, LATER)
    assert (start.version.number, start.evidence.challenger) == (1, 2)


@pytest.mark.slow
def test_only_states_that_a_run_may_go_on_from_are_kept(pair: Pair, tmp_path: Path) -> None:
    states = load_settings().artifacts / "state"
    for name in ("old", "new"):
        with staged(states / name) as directory:
            (directory / "state.safetensors").write_text(name)
    new = publish(states / "new", "state")
    trained = Trained(draft=made(pair.target_files.path, tmp_path / "candidate", seed=2), state=new)
    start = find_challenger.fn(RECIPE, pair, WINDOW)
    register_candidate.fn(RECIPE, pair, start, trained, WINDOW, samples_of(tmp_path), judge({"chat": 0.0}))
    assert [folder.name for folder in states.iterdir()] == ["new"]
    assert find_challenger.fn(RECIPE, pair, LATER).state == new


@pytest.mark.slow
def test_evidence_at_another_k_is_not_gone_on_with_but_the_weights_are(pair: Pair, tmp_path: Path) -> None:
    register(pair, tmp_path, {"chat": 0.0})
    engine = RECIPE.engine.model_copy(update={"num_draft_tokens": 3})
    start = find_challenger.fn(RECIPE.model_copy(update={"engine": engine}), pair, LATER)
    assert (start.version.number, start.evidence.challenger, start.evidence.num_windows) == (2, 2, 0)
