from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from models.core.drafting.draft_families import family_named
from models.core.learning import distill
from models.core.learning.hidden import Sample, hidden_states
from models.core.learning.loop import Workers
from models.core.learning.validation import Validation, split
from models.drafts import Draft
from tests.models.core.learning.runs import killed_at, require_equal, short
from tests.models.drafts.answered import answers_of, prompts, tau_of
from tests.models.drafts.tiny import make_tiny

K = 3
Train = Callable[..., tuple[Draft, distill.Report]]


def sample(number: int, domain: str = "chat", cluster: str = "") -> Sample:
    return Sample(str(number), domain, [1], [2, 3, 4], cluster=cluster)


def test_each_domain_gives_its_share_and_no_cluster_is_on_both_sides() -> None:
    clusters = [f"c{number // 3}" for number in range(60)]
    samples = [sample(n, "chat" if n < 30 else "code", cluster) for n, cluster in enumerate(clusters)]
    learnt, kept = split(samples, 0.2, seed=0)
    assert sorted([*learnt, *kept], key=lambda one: int(one.id)) == samples
    assert Counter(one.domain for one in kept) == {"chat": 6, "code": 6}
    assert not {one.cluster for one in learnt} & {one.cluster for one in kept}
    assert split(samples, 0.2, seed=0) == (learnt, kept)
    assert split(samples, 0.2, seed=1) != (learnt, kept)


def test_a_cluster_larger_than_the_share_is_learnt_and_so_is_a_domain_of_one_answer() -> None:
    samples = [*(sample(n, cluster="large") for n in range(9)), sample(9), sample(10, "rare")]
    learnt, kept = split(samples, 0.2, seed=0)
    assert [one.id for one in kept] == ["9"]
    assert len(learnt) == 10
    assert split(samples[:9], 0.2, seed=0) == (samples[:9], [])


def test_without_a_share_all_is_learnt_and_only_unseen_clusters_are_kept() -> None:
    samples = [sample(n, cluster=f"c{n // 2}") for n in range(20)]
    assert split(samples, 0.0, seed=0) == (samples, [])
    unseen = {"4", "5", "6"}  # of cluster 3 another one was learnt before
    assert {one.id for one in split(samples, 0.5, 0, unseen)[1]} == {"4", "5"}


def looked(taus: list[float], patience: int = 2) -> Validation:
    """A run of ten steps a pass that was looked at after each; no model is asked."""
    validation = Validation(None, Path(), [sample(0)], K, patience, 10, Path())  # type: ignore[arg-type]
    validation.taus = [(10 * number, tau) for number, tau in enumerate(taus, 1)]
    return validation


def test_a_run_ends_after_as_many_passes_without_a_better_one_as_there_is_patience_for() -> None:
    assert not looked([]).is_over
    assert not looked([1.5, 1.4]).is_over
    assert not looked([1.5, 1.4, 1.6, 1.6]).is_over  # as good is no better
    ended = looked([1.5, 1.4, 1.6, 1.6, 1.5])
    assert ended.is_over
    assert ended.best == (30, 1.6)
    assert looked([1.5, 1.4], patience=1).is_over


def test_a_look_is_due_behind_each_pass_and_at_the_end() -> None:
    fresh, after_one = looked([]), looked([1.5])
    assert [step for step in range(31) if fresh.is_due(step)] == [10, 20, 30]
    assert not after_one.is_due(10)
    assert after_one.is_due(13, at_end=True)
    assert [fresh.place(step) for step in (1, 5, 10, 11)] == pytest.approx([0.1, 0.5, 1.0, 0.1])
    nothing = Validation(None, Path(), [Sample("0", "chat", [1], [2, 3])], K, 2, 10, Path())  # type: ignore[arg-type]
    assert not nothing.is_due(10) and not nothing.is_over  # an answer of two tokens has no step to count


@pytest.fixture(scope="module")
def samples(tiny_target: Path) -> list[Sample]:
    return answers_of(tiny_target, prompts(12))


@pytest.fixture
def train(tiny_target: Path, samples: list[Sample], tmp_path: Path) -> Train:
    """Train a new head in a folder, and keep its state beside that."""

    def run(folder: str, **changes: object) -> tuple[Draft, distill.Report]:
        params = short(**{"num_epochs": 12, "batch_tokens": 96, "validation": 0.25, "patience": 2, **changes})
        head, out = make_tiny(family_named("eagle3"), tiny_target), tmp_path / f"{folder}.safetensors"
        return head, distill.train(head, tiny_target, samples, params, K, tmp_path / folder, state_out=out)

    return run


def play(monkeypatch: pytest.MonkeyPatch, taus: list[float]) -> None:
    """Have looks find these, in turn."""
    left = iter(taus)

    def look(self: Validation, step: int, workers: Workers) -> bool:
        self.taus.append((step, next(left)))
        return self.best == self.taus[-1]

    monkeypatch.setattr(Validation, "look", look)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"schedule": "constant", "average": 0.8}])
def test_the_best_pass_stays_with_its_mean_and_the_state_that_others_go_on_from(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    """Ended by patience behind pass 2, it is what a run of the same schedule is that is cut there."""
    play(monkeypatch, [1.1, 1.3, 1.2, 1.2])
    stopped, report = train("a", **settings)
    per_pass = report.taus[0][0]
    assert report.taus == [(n * per_pass, tau) for n, tau in enumerate([1.1, 1.3, 1.2, 1.2], 1)]
    assert (report.num_steps, report.num_validated) == (4 * per_pass, 3)
    assert len(list((tmp_path / "a").glob("looked-at-*"))) == 1
    play(monkeypatch, [1.1, 1.3, 1.2])
    cut, _ = train("b", patience=1, **settings)
    monkeypatch.setattr(Validation, "is_over", property(lambda self: len(self.taus) == 2))
    play(monkeypatch, [1.1, 1.3])
    last, _ = train("c", **settings)
    require_equal(stopped, cut, last)
    states = [load_file(tmp_path / f"{name}.safetensors") for name in "abc"]
    assert all(torch.equal(states[0][name], other[name]) for other in states[1:] for name in states[0])


@pytest.mark.slow
@pytest.mark.parametrize("step", [5, 17])
def test_a_run_killed_anywhere_ends_as_the_unbroken_one(
    train: Train, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    """Looks are real; the kill comes in the middle of a step, some steps after the last checkpoint."""
    settings = {"schedule": "constant", "average": 0.8, "learning_rate": 4e-3}
    whole, report = train("whole", **settings)
    assert len(report.taus) > 2
    with killed_at(step, monkeypatch):
        train("cut", **settings)
    resumed, again = train("cut", **settings)
    assert again.taus == report.taus
    require_equal(whole, resumed)


@pytest.mark.slow
def test_a_look_counts_as_serving_and_changes_nothing(tiny_target: Path, samples: list[Sample], tmp_path: Path) -> None:
    head, untouched = (make_tiny(family_named("eagle3"), tiny_target) for _ in range(2))
    hidden_states(head, tiny_target, samples, tmp_path)
    validation = Validation(head, tiny_target, samples[:4], K, 2, 10, tmp_path)
    assert validation.look(10)
    assert validation.taus == [(10, tau_of(head, tiny_target, samples[:4], K, tmp_path))]
    require_equal(untouched, head)


@pytest.mark.slow
def test_best_weights_that_somebody_removed_are_missed(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    play(monkeypatch, [1.3, 1.2, 1.2])
    monkeypatch.setattr(Validation, "keep", lambda *_: None)
    with pytest.raises(FileNotFoundError, match="the best pass's weights are gone"):
        train("work")
