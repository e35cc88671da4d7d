from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from infra.artifacts import Artifact, publish, staged
from infra.environment import environment_of
from infra.erase.job import Job
from infra.erase.leftovers import remove_work
from infra.querylog import QueryLog
from infra.registry import open_registry
from infra.settings import load_settings
from infra.windows import Window
from models.answers import on_policy
from models.core.drafting.draft_families import family_named, open_draft
from models.core.evaluation import scoring
from models.core.evaluation.gate import Evidence
from models.core.evaluation.paired import Score
from models.core.layers.decoder import Sublayers
from models.core.learning import fitted
from models.core.learning.hidden import Sample
from models.core.learning.rollouts import Rollouts
from models.drafts import Draft, ngram, rest, self_skip
from models.lengths import specdec_pp
from models.recipe import Recipe
from models.targets import describe
from tasks.distill_draft import Trained, distill_draft, teachers_in, train_challenger, trained_context, untrained
from tasks.find_challenger import Start
from tests.infra.erase.planted import SUBJECT, planted_row
from tests.models.drafts.hollow import make_hollow
from tests.models.drafts.tiny import make_tiny
from tests.tasks.made import TABLES, pair_of, recipe_of, said_by, samples_files

pytestmark = pytest.mark.usefixtures("home")

WINDOW = Window(first_seq=1, last_seq=9, num_rows=0, sha256="0" * 64, owner="test")
SAMPLES = [Sample("1", "code", [3, 4], [5, 6]), Sample("2", "chat", [7], [8, 9])]
OFFLINE = {"serve": None, "demo": None, "engine": {"name": "torch"}}
LM = {**OFFLINE, "draft": {"name": "lm", "num_layers": 1}, "refresh": None}
Fill = Callable[[int], None]


@pytest.fixture
def fill(monkeypatch: pytest.MonkeyPatch) -> Fill:
    """What lets memory run out so many times."""
    clip, left = torch.nn.utils.clip_grad_norm_, []

    def full(*args: Any, **options: Any) -> Any:
        if left and left.pop():
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return clip(*args, **options)

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", full)
    return lambda times: left.extend([1] * times)


def go_on(recipe: Recipe, target: Artifact, samples: Artifact, last: Trained, window: Window = WINDOW) -> Trained:
    """Train a challenger from a draft, as a refresh does."""
    pair = pair_of(target, last.draft)
    start = Start(version=pair.draft, files=last.draft, state=last.state, evidence=Evidence.start(2, 1))
    return train_challenger.fn(recipe, pair, start, samples, window)


def test_a_new_store_holds_the_answers_for_training_and_a_refresh_adds_no_clients_text(
    tiny_target: Path, tmp_path: Path
) -> None:
    draft = untrained(rest.Params(), None, tiny_target, SAMPLES)
    assert draft.store.texts == [[3, 4, 5, 6], [7, 8, 9]]
    rest.save(draft, tmp_path)
    later = [Sample("3", "code", [10], [11, 12])]
    assert untrained(rest.Params(), tmp_path, tiny_target, later).store.texts == draft.store.texts


@pytest.mark.slow
def test_a_family_that_is_searched_for_is_fitted_to_the_answers_for_training(tmp_path: Path) -> None:
    """Of a target whose middle layers add nothing, all that they are is skipped."""
    recipe = recipe_of(**OFFLINE, draft={"name": "self_skip", "num_trials": 30}, distill={}, refresh=None)
    with staged(tmp_path / "target") as directory:
        make_hollow(directory, 4, {1, 2}, {1, 2})
    target = publish(tmp_path / "target", "target")
    draft = distill_draft.fn(recipe, target, samples_files(tmp_path / "samples", said_by(target, 1)))
    inner = frozenset({1, 2})
    assert self_skip.load(draft.path, target.path).skipped == Sublayers(inner, inner)


@pytest.mark.slow
def test_a_head_that_a_recipe_asks_for_is_built_with_the_draft_and_again_in_a_refresh(
    target: Artifact, tmp_path: Path
) -> None:
    engine = {"name": "torch", "lengths": {"name": "specdec_pp"}}
    distill = TABLES["distill"] | {"lengths": {"name": "specdec_pp", "num_layers": 1}}
    recipe = recipe_of(**{**OFFLINE, "engine": engine}, draft={"name": "lm", "num_layers": 1}, distill=distill)
    samples = samples_files(tmp_path / "samples", said_by(target, 9))
    first = distill_draft.fn(recipe, target, samples)
    once = go_on(recipe, target, samples, Trained(draft=first, state=None))
    heads = [one.path / fitted.FOLDER / specdec_pp.FILE for one in (first, once.draft)]
    assert heads[0].read_bytes() != heads[1].read_bytes()
    with pytest.raises(ValueError, match="a draft of family ngram is not trained, so no head can be fit behind it"):
        distill_draft.fn(recipe.model_copy(update={"draft": ngram.Params()}), target, samples)


def test_the_device_that_a_recipe_names_is_the_trainers(target: Artifact, tmp_path: Path) -> None:
    recipe = recipe_of(**LM, distill={"device": "cuda:7"})
    samples = samples_files(tmp_path / "samples", said_by(target, 9))
    with pytest.raises(ValueError, match="device cuda:7 is not here; torch sees cpu"):
        distill_draft.fn(recipe, target, samples)


@pytest.mark.slow
def test_where_memory_runs_out_a_draft_is_trained_once_more_with_half_the_batch(
    target: Artifact, tmp_path: Path, fill: Fill, caplog: pytest.LogCaptureFixture
) -> None:
    samples = samples_files(tmp_path / "samples", said_by(target, 9))

    def trained(batch_tokens: int) -> bytes:
        recipe = recipe_of(**LM, distill=TABLES["distill"] | {"batch_tokens": batch_tokens})
        return (distill_draft.fn(recipe, target, samples).path / "model.safetensors").read_bytes()

    halved = trained(128)
    fill(1)
    assert trained(256) == halved
    assert "memory of cpu ran out with batches of 256 tokens; trained anew with 128" in caplog.text
    fill(2)
    with pytest.raises(torch.OutOfMemoryError):
        trained(512)


@pytest.mark.slow
def test_a_text_far_longer_than_the_others_is_learnt_to_their_length_or_to_what_memory_suffices_for(
    target: Artifact, tmp_path: Path, fill: Fill, caplog: pytest.LogCaptureFixture
) -> None:
    """Of 200 texts of 40 tokens and two longer ones 40 are learnt, more than a batch has; then half of them."""
    texts = [Sample(f"s{number}", "chat", [5] * 8, [6 + number] * 32) for number in range(200)]
    texts += [Sample("long", "chat", [5] * 8, [6] * 392), Sample("longer", "chat", [5] * 300, [6] * 92)]
    samples = samples_files(tmp_path / "samples", texts)
    distill = TABLES["distill"] | {"batch_tokens": 32, "num_epochs": 1}
    caplog.set_level("INFO")
    recipe = recipe_of(**LM, distill=distill)
    assert trained_context(distill_draft.fn(recipe, target, samples)) == 40
    assert "2 of 202 texts are longer than 40 tokens: their ends are not learnt, 1 have no answer before" in caplog.text
    fill(1)
    again = recipe.model_copy(update={"seed": 9})
    assert trained_context(distill_draft.fn(again, target, samples)) == 20
    with pytest.raises(ValueError, match="max_length 10 leaves no answer to learn; the shortest prompt has 8"):
        distill_draft.fn(recipe_of(**LM, distill=distill | {"max_length": 10}), target, samples)


def test_an_erasure_removes_what_a_draft_was_writing_to_learn_from_when_its_run_was_killed(
    tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, row = load_settings(environment_of(tmp_path / "home")), planted_row(0)
    log, work = QueryLog(settings.querylog), settings.artifacts / "work" / "killed"
    log.append([row])
    head, learnt = make_tiny(family_named("eagle3"), tiny_target), [Sample(row.id, "chat", [3, 4], [5, 6, 7])]
    run = Rollouts(head, tiny_target, learnt, on_policy.Params(), num_draft_tokens=3, work_dir=work, seed=0)

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as machine, pytest.raises(KeyboardInterrupt):
        machine.setattr(Path, "replace", killed)
        run.begin(0, "key", lambda *done: None)
    [left] = [file for file in work.rglob("*") if file.is_file()]
    assert row.id in left.read_text()
    remove_work(Job(settings, log, 0, log.erasures.begin(subjects=(SUBJECT,))))
    assert not work.exists()
    log.close()


@pytest.mark.slow
def test_a_draft_learns_of_a_teacher_and_another_weight_makes_another_draft(target: Artifact, tmp_path: Path) -> None:
    samples, made = samples_files(tmp_path / "samples", said_by(target, 2)), {}
    for weight in (0.0, 1.0, 1.0):
        teachers = [{"model": {"name": "random", "seed": 1}, "weight": weight}]
        recipe = recipe_of(distill=TABLES["distill"] | {"num_epochs": 1, "teachers": teachers})
        assert made.setdefault(weight, distill_draft.fn(recipe, target, samples)) == made[weight]
        [(sha256, told)] = teachers_in(recipe.distill).items()
        assert sha256 != describe(target.path).sha256
        assert told == {"name": "random-llama-1", "weight": weight}
    assert made[0.0].sha256 != made[1.0].sha256


@pytest.mark.slow
@pytest.mark.parametrize("name", ["chimera", "dflash", "eagle", "medusa"])
def test_a_family_that_is_trained_for_its_target_is_built_and_goes_on_learning_in_refreshes(
    name: str, target: Artifact, tmp_path: Path
) -> None:
    own = {"vocab_size": 128} if "vocab_size" in family_named(name).Params.model_fields else {}
    few = {"distill": {**TABLES["distill"], "num_epochs": 2}}
    recipe = recipe_of(**OFFLINE, **few, draft={"name": name, **own}, refresh={**TABLES["refresh"], "distill": {}})
    samples = samples_files(tmp_path / "samples", said_by(target, 4))
    first = distill_draft.fn(recipe, target, samples)
    once = go_on(recipe, target, samples, Trained(draft=first, state=None))
    twice = go_on(recipe, target, samples, once)
    made = [open_draft(one.path, target.path).state_dict() for one in (first, once.draft, twice.draft)]
    learnt = [key for key in made[0] if made[0][key].is_floating_point()]
    assert all(any(not torch.equal(before[key], after[key]) for key in learnt) for before, after in pairwise(made))
    assert once.state is not None and twice.state is not None


@pytest.mark.slow
def test_a_build_and_a_refresh_stop_when_answers_kept_from_them_say_so_and_tell_it(
    target: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A refresh keeps answers of its own window only, of clusters that have no older answer."""
    distill = {"num_epochs": 40, "batch_tokens": 64, "validation": 0.25, "patience": 1}
    recipe = recipe_of(**OFFLINE, distill=distill, refresh=TABLES["refresh"] | {"distill": {}})
    clusters = zip(said_by(target, 9), ["mixed", "mixed", "new", *(f"old {n}" for n in range(6))], strict=True)
    named = (row._replace(id=f"row-{row.id}", cluster=name) for row, name in clusters)
    samples = samples_files(tmp_path / "samples", named)
    log = QueryLog(load_settings().querylog)
    log.append([planted_row(n).model_copy(update={"id": f"row-{n + 1}"}) for n in range(2)])
    window = Window(first_seq=1, last_seq=2, num_rows=2, sha256="0" * 64, owner="test")
    asked: list[list[str]] = []
    score = scoring.score

    def noted(draft: Draft, target: Path, kept: list[Sample], *more: object) -> list[Score]:
        asked.append([one.id for one in kept])
        return score(draft, target, kept, *more)

    monkeypatch.setattr(scoring, "score", noted)
    first = distill_draft.fn(recipe, target, samples)
    assert len(asked[0]) == 2  # a quarter of nine
    num_looks = len(asked)
    go_on(recipe, target, samples, Trained(draft=first, state=None), window)
    assert asked[num_looks:] and all(ids == ["row-2"] for ids in asked[num_looks:])
    told = [metrics for metrics in open_registry().store.recorded("distill") if "validation/looks" in metrics]
    assert [one["num_validated"] for one in told] == [1, 2]  # newest first
    assert all(one["validation/looks"] <= 40 and one["validation/tau"] >= 1 for one in told)
    log.close()
