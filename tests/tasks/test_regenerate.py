"""Logged prompts that the target answers again: which, what of it is learnt, and that an erasure and a kill find it."""

import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from infra.artifacts import Artifact
from infra.consent import AGAIN, QueryRow
from infra.erase.job import Job
from infra.erase.leftovers import remove_work
from infra.erase.snapshots import rewrite_snapshots
from infra.home import open_home
from infra.querylog import QueryLog
from infra.registry import open_registry
from infra.settings import Settings, load_settings
from infra.windows import Window
from models.core.checkpoints.loading import load_model
from models.core.layers.kernels import fast_dtype
from models.core.learning import answering
from models.core.learning.answering import Ask
from models.core.learning.hidden import Sample
from models.recipe import Recipe, Regeneration, load_recipe
from tasks import regenerate as module
from tasks.regenerate import choose, merge, regenerate
from tasks.stages.samples import read_samples
from tests.models.drafts.answered import prompts
from tests.tasks.made import pair_of, row_of, samples_files, target_files

MINE, OTHERS = "mine", "somebody"


@pytest.fixture
def settings(tmp_path: Path, store: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Settings]:
    """A home as a flow enters it."""
    monkeypatch.setenv("REDRAFT_HOME", str(tmp_path / "home"))
    umask = os.umask(0o022)
    try:
        open_home(load_settings())
        shutil.copy(store, load_settings().home / "mlflow.db")
        yield load_settings()
    finally:
        os.umask(umask)


def row(number: int, finish: str = "length", given: int = 4, temperature: float = 0.0) -> QueryRow:
    return row_of(
        f"row-{number}",
        subject=MINE if number == 0 else OTHERS,
        domain="chat",
        prompt_ids=prompts(number + 1)[number],
        completion_ids=[40 + number + place for place in range(given)],
        sampling={"temperature": temperature},
        finish_reason=finish,
    )


def sample(of: QueryRow) -> Sample:
    assert of.prompt_ids is not None and of.completion_ids is not None
    return Sample(of.id, of.domain, of.prompt_ids, of.completion_ids, float(str(of.sampling["temperature"])), of.id)


class Scene:
    """A log of rows, the samples that a refresh made of them, and a recipe that answers again."""

    def __init__(self, settings: Settings, target: Path, rows: list[QueryRow], **again: object) -> None:
        self.settings, self.log = settings, QueryLog(settings.querylog)
        self.log.append(rows)
        recipe = load_recipe("tiny")
        refresh = recipe.refresh.model_copy(update={"regenerate": Regeneration(**{"max_tokens": 10, **again})})
        self.recipe: Recipe = recipe.model_copy(update={"refresh": refresh})
        files = target_files(target, settings.home / "target")
        self.pair = pair_of(files, files)
        self.window = Window(first_seq=1, last_seq=len(rows), num_rows=len(rows), sha256="0" * 64, owner="test")
        self.older = Sample("older", "chat", [5, 6], [7, 8, 9], cluster="older")
        train = [*map(sample, rows[:-1]), self.older]
        self.samples = samples_files(settings.artifacts / "window" / "made", train, [sample(rows[-1])])

    def run(self) -> Artifact:
        return regenerate.fn(self.recipe, self.pair, self.window, self.samples)

    def said(self, text: list[int], number: int) -> list[int]:
        """What the target goes on with, asked alone."""
        model = load_model(self.pair.target_files.path, fast_dtype("cpu"))
        [said] = answering.go_on(model, [Ask(text, number)], frozenset(), torch.Generator())
        return said


@pytest.fixture
def endless(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no token end an answer."""
    monkeypatch.setattr(module, "stop_ids", lambda directory: frozenset())


@pytest.mark.slow
@pytest.mark.usefixtures("endless")
def test_answers_that_were_cut_are_gone_on_with_in_their_place_and_nothing_else_changes(
    settings: Settings, tiny_target: Path
) -> None:
    rows = [row(0), row(1, "stop"), row(2, given=10), row(3), row(4)]
    scene = Scene(settings, tiny_target, rows)
    learnt = scene.run()
    wanted = [*map(sample, rows[:-1]), scene.older]  # row-4 is held out
    for number in (0, 3):
        before = wanted[number]
        longer = before.completion_ids + scene.said(before.token_ids, 6)
        wanted[number] = before._replace(completion_ids=longer)
    assert read_samples(learnt, "train") == wanted
    assert not (learnt.path / "held_out.jsonl").exists()
    assert read_samples(scene.samples, "held_out") == [sample(rows[4])]  # what the gate reads
    written = list((settings.artifacts / "answered").rglob("*"))
    assert written and all(path.stat().st_mode & 0o077 == 0 for path in written)
    [metrics] = open_registry().store.recorded("answer again")
    assert (metrics["answers"], metrics["tokens"]) == (2, 12)
    assert scene.run() == learnt


@pytest.mark.slow
def test_prompts_are_answered_anew_beside_what_was_served(settings: Settings, tiny_target: Path) -> None:
    rows = [row(0, "stop"), row(1), row(2)]
    found = {one.id: one for one in read_samples(Scene(settings, tiny_target, rows, temperature=1.0).run(), "train")}
    served = {"row-0", "row-1", "older"}
    assert len(found["row-0"].completion_ids) == 4 < len(found["row-1"].completion_ids)  # which was cut
    assert served < set(found) <= served | {f"row-0{AGAIN}", f"row-1{AGAIN}"}
    for name in set(found) - served:
        again, before = found[name], found[name.removesuffix(AGAIN)]
        assert (again.prompt_ids, again.cluster, again.domain) == (before.prompt_ids, before.cluster, before.domain)
        assert again.temperature == 1.0 and 3 <= len(again.completion_ids) <= 10


def test_who_does_not_ask_for_it_learns_what_was_served(settings: Settings, tiny_target: Path) -> None:
    scene = Scene(settings, tiny_target, [row(0), row(1)])
    refresh = scene.recipe.refresh.model_copy(update={"regenerate": None})
    scene.recipe = scene.recipe.model_copy(update={"refresh": refresh})
    assert scene.run() == scene.samples


def test_only_the_windows_own_prompts_are_asked_so_many_of_each_domain() -> None:
    rows = [row(number) for number in range(8)]
    learnt = [*map(sample, rows), Sample("older", "chat", [5], [6, 7, 8])]
    by_id = {one.id: one for one in rows}
    chosen = choose(learnt, by_id, Regeneration(max_tokens=10, per_domain=3), seed=0)
    assert len(chosen) == 3 and {one.id for one in chosen} <= set(by_id)
    assert choose(learnt, by_id, Regeneration(max_tokens=4, temperature=None), seed=0) == []  # all were cut there
    assert len(choose(learnt, by_id, Regeneration(max_tokens=4, temperature=0.5), seed=0)) == 8
    forms = {name: one.model_copy(update={"structured": True}) for name, one in by_id.items()}
    assert choose(learnt, forms, Regeneration(max_tokens=10, per_domain=3), seed=0) == []
    longer = learnt[0]._replace(completion_ids=[1, 2, 3])
    beside = learnt[1]._replace(id=f"row-1{AGAIN}")
    assert merge(learnt, [longer, beside]) == [longer, *learnt[1:], beside]


@pytest.mark.slow
def test_an_answer_that_a_log_would_not_hold_is_not_learnt(
    settings: Settings, tiny_target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the target says is written by the test."""
    address = AutoTokenizer.from_pretrained(tiny_target).encode(" bob@example.com ", add_special_tokens=False)
    monkeypatch.setattr(answering, "go_on", lambda model, asks, *_: [list(address) for _ in asks])
    scene = Scene(settings, tiny_target, [row(0), row(1), row(2)], max_tokens=40)
    assert read_samples(scene.run(), "train") == read_samples(scene.samples, "train")


@pytest.mark.slow
def test_when_the_minutes_are_over_the_rest_is_learnt_as_it_was_served(settings: Settings, tiny_target: Path) -> None:
    scene = Scene(settings, tiny_target, [row(0), row(1), row(2)], max_minutes=1e-9)
    assert read_samples(scene.run(), "train") == read_samples(scene.samples, "train")


def killed(*_: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.slow
def test_a_run_that_was_killed_leaves_nothing_half_made_and_the_next_asks_only_for_the_rest(
    settings: Settings, tiny_target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = Scene(settings, tiny_target, [row(number) for number in range(5)])
    monkeypatch.setattr(module, "BATCH", 2)
    go_on, asked, limit = answering.go_on, [], [1]

    def noted(model: object, asks: list[Ask], *more: object) -> list[list[int]]:
        if len(asked) == limit[0]:
            raise KeyboardInterrupt
        asked.append(len(asks))
        return go_on(model, asks, *more)

    monkeypatch.setattr(answering, "go_on", noted)
    with pytest.raises(KeyboardInterrupt):
        scene.run()
    folder = settings.artifacts / "answered"
    assert [path for path in folder.glob("*") if (path / "train.jsonl").exists()] == []
    [file] = (settings.artifacts / "work").rglob(module.FILE)
    assert len(file.read_text().splitlines()) == 2
    assert file.stat().st_mode & 0o077 == 0
    limit[0] = 9
    found = read_samples(scene.run(), "train")
    assert asked == [2, 2]
    assert all(len(one.completion_ids) > 4 for one in found if one.id != "older")
    assert not file.exists()


@pytest.mark.slow
@pytest.mark.usefixtures("endless")
@pytest.mark.parametrize(("temperature", "is_killed"), [(None, True), (1.0, False)])
def test_an_erasure_reaches_what_was_answered_again_and_what_a_kill_left_of_it(
    settings: Settings, tiny_target: Path, monkeypatch: pytest.MonkeyPatch, temperature: float | None, is_killed: bool
) -> None:
    scene = Scene(settings, tiny_target, [row(number) for number in range(4)], temperature=temperature)
    with monkeypatch.context() as machine, suppress(KeyboardInterrupt):
        machine.setattr(module, "write_samples", killed if is_killed else module.write_samples)
        scene.run()
    held = [path for path in settings.artifacts.rglob("*.jsonl") if "row-0" in path.read_text()]
    assert len(held) == 2
    assert {path.parent.parent.name for path in held} == {"window", "work" if is_killed else "answered"}
    job = Job(settings, scene.log, 0, scene.log.erasures.begin(subjects=(MINE,)))
    rewrite_snapshots(job)
    remove_work(job)
    left = list(settings.artifacts.rglob("*.jsonl"))
    assert left and not any("row-0" in path.read_text() for path in left)
    assert all("row-1" in path.read_text() for path in left if path.name == "train.jsonl")
    scene.log.close()
