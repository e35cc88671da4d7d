import tomllib
from itertools import pairwise
from pathlib import Path
from shutil import copy, copytree, ignore_patterns

import pytest
import torch

from infra.artifacts import publish, staged
from infra.environment import settings_of
from infra.erase.job import Job
from infra.erase.leftovers import remove_work
from infra.querylog import QueryLog
from infra.registry import open_registry
from infra.settings import load_settings
from infra.versions import Pair, Version
from infra.windows import Window
from models.answers import on_policy
from models.drafting.draft_families import family_named, open_draft
from models.drafts import Draft, ngram, rest, self_skip
from models.evaluation import scoring
from models.evaluation.gate import Evidence
from models.evaluation.paired import Score
from models.layers.decoder import Sublayers
from models.learning import fitted
from models.learning.hidden import Sample
from models.learning.rollouts import Rollouts
from models.lengths import specdec_pp
from models.recipe import parse_recipe, shipped_recipes
from models.targets import describe
from tasks.distill_draft import distill_draft, train_challenger, untrained
from tasks.find_challenger import Start
from tasks.stages.samples import write_samples
from tasks.stages.teachers import teachers_in
from tests.infra.erase.planted import SUBJECT, planted_row
from tests.models.drafts.answered import answer_all, prompts
from tests.models.drafts.hollow import make_hollow
from tests.models.drafts.tiny import make_tiny

WINDOW = Window(first_seq=1, last_seq=9, num_rows=0, sha256="0" * 64, owner="test")
SAMPLES = [Sample("1", "code", [3, 4], [5, 6]), Sample("2", "chat", [7], [8, 9])]


@pytest.fixture(autouse=True)
def _home(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A home with an empty registry."""
    (tmp_path / "home").mkdir()
    copy(store, tmp_path / "home")
    monkeypatch.setenv("REDRAFT_HOME", str(tmp_path / "home"))


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
    tables = tomllib.loads(shipped_recipes()["tiny"].read_text())
    for name in ("serve", "demo", "distill", "refresh"):
        del tables[name]
    tables["engine"], tables["draft"] = {"name": "torch"}, {"name": "self_skip", "num_trials": 30}
    tables["distill"] = {}
    recipe = parse_recipe({"name": "r", **tables}, "r")
    with staged(tmp_path / "target") as directory:
        make_hollow(directory, 4, {1, 2}, {1, 2})
    target = publish(tmp_path / "target", "target")
    [answered] = answer_all(target.path, None, prompts(1))
    with staged(tmp_path / "samples") as directory:
        write_samples(directory, "train", [Sample("1", "code", [*answered.prompt_ids], [*answered.token_ids])])
    draft = distill_draft.fn(recipe, target, publish(tmp_path / "samples", "samples"))
    inner = frozenset({1, 2})
    assert self_skip.load(draft.path, target.path).skipped == Sublayers(inner, inner)


@pytest.mark.slow
def test_a_head_that_a_recipe_asks_for_is_built_with_the_draft_and_again_in_a_refresh(
    tiny_target: Path, tmp_path: Path
) -> None:
    tables = tomllib.loads(shipped_recipes()["tiny"].read_text())
    del tables["serve"], tables["demo"]
    tables["engine"] = {"name": "torch", "lengths": {"name": "specdec_pp"}}
    tables["draft"] = {"name": "lm", "num_layers": 1}
    tables["distill"]["lengths"] = {"name": "specdec_pp", "num_layers": 1}
    recipe = parse_recipe({"name": "r", **tables}, "r")
    with staged(tmp_path / "target") as directory:
        copytree(tiny_target, directory, dirs_exist_ok=True, ignore=ignore_patterns("manifest.json"))
    target = publish(tmp_path / "target", "target")
    with staged(tmp_path / "samples") as directory:
        answered = answer_all(target.path, None, prompts(9))
        rows = [Sample(str(n), "chat", [*one.prompt_ids], [*one.token_ids]) for n, one in enumerate(answered)]
        write_samples(directory, "train", rows)
    samples = publish(tmp_path / "samples", "samples")
    first = distill_draft.fn(recipe, target, samples)
    version = Version(kind="draft", number=1, sha256="0" * 64, tags={}, created_ms=0)
    pair = Pair(target=version, draft=version, target_files=target, draft_files=first)
    start = Start(version=version, files=first, state=None, evidence=Evidence.start(2, 1), going_on=False)
    once = train_challenger.fn(recipe, pair, start, samples, WINDOW)
    heads = [one.path / fitted.FOLDER / specdec_pp.FILE for one in (first, once.draft)]
    assert heads[0].read_bytes() != heads[1].read_bytes()
    with pytest.raises(ValueError, match="a draft of family ngram is not trained, so no head can be fit behind it"):
        distill_draft.fn(recipe.model_copy(update={"draft": ngram.Params()}), target, samples)


def test_an_erasure_removes_what_a_draft_was_writing_to_learn_from_when_its_run_was_killed(
    tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, row = settings_of(tmp_path / "home"), planted_row(0)
    log, work = QueryLog(settings.querylog), settings.artifacts / "work" / "killed"
    log.append([row])
    run = Rollouts(
        make_tiny(family_named("eagle3"), tiny_target),
        tiny_target,
        [Sample(row.id, "chat", [3, 4], [5, 6, 7])],
        on_policy.Params(),
        num_draft_tokens=3,
        work_dir=work,
        seed=0,
    )

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
def test_a_draft_learns_of_a_teacher_and_another_weight_makes_another_draft(tiny_target: Path, tmp_path: Path) -> None:
    with staged(tmp_path / "target") as directory:
        copytree(tiny_target, directory, dirs_exist_ok=True, ignore=ignore_patterns("manifest.json"))
    with staged(tmp_path / "samples") as directory:
        answered = answer_all(tiny_target, None, prompts(2))
        write_samples(
            directory,
            "train",
            [Sample(one.request_id, "chat", [*one.prompt_ids], [*one.token_ids]) for one in answered],
        )
    target, samples = publish(tmp_path / "target", "target"), publish(tmp_path / "samples", "samples")
    tables, made = tomllib.loads(shipped_recipes()["tiny"].read_text()), {}
    for weight in (0.0, 1.0, 1.0):
        tables["distill"]["num_epochs"] = 1
        tables["distill"]["teachers"] = [{"model": {"name": "random", "seed": 1}, "weight": weight}]
        recipe = parse_recipe({"name": "r", **tables}, "r")
        assert made.setdefault(weight, distill_draft.fn(recipe, target, samples)) == made[weight]
        [(sha256, told)] = teachers_in(recipe.distill).items()
        assert sha256 != describe(tiny_target).sha256
        assert told == {"name": "random-llama-1", "weight": weight}
    assert made[0.0].sha256 != made[1.0].sha256


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["chimera", "clover", "dflash", "eagle", "falcon", "hydra", "medusa", "parallel_eagle", "prompt_tokens"],
)
def test_a_family_that_is_trained_for_its_target_is_built_and_goes_on_learning_in_refreshes(
    name: str, tiny_target: Path, tmp_path: Path
) -> None:
    tables = tomllib.loads(shipped_recipes()["tiny"].read_text())
    own = {"vocab_size": 128} if "vocab_size" in family_named(name).Params.model_fields else {}
    del tables["serve"], tables["demo"]
    tables["engine"], tables["draft"] = {"name": "torch"}, {"name": name, **own}
    recipe = parse_recipe({"name": "r", **tables}, "r")
    with staged(tmp_path / "target") as directory:
        copytree(tiny_target, directory, dirs_exist_ok=True, ignore=ignore_patterns("manifest.json"))
    target = publish(tmp_path / "target", "target")
    answered = answer_all(target.path, None, prompts(4))
    with staged(tmp_path / "samples") as directory:
        rows = [Sample(one.request_id, "chat", [*one.prompt_ids], [*one.token_ids]) for one in answered]
        write_samples(directory, "train", rows)
    samples = publish(tmp_path / "samples", "samples")
    first = distill_draft.fn(recipe, target, samples)
    version = Version(kind="draft", number=1, sha256="0" * 64, tags={}, created_ms=0)
    pair = Pair(target=version, draft=version, target_files=target, draft_files=first)
    start = Start(version=version, files=first, state=None, evidence=Evidence.start(2, 1), going_on=False)
    once = train_challenger.fn(recipe, pair, start, samples, WINDOW)
    twice = train_challenger.fn(
        recipe, pair, start.model_copy(update={"files": once.draft, "state": once.state}), samples, WINDOW
    )
    made = [open_draft(one.path, target.path).state_dict() for one in (first, once.draft, twice.draft)]
    learnt = [key for key in made[0] if made[0][key].is_floating_point()]
    assert all(any(not torch.equal(before[key], after[key]) for key in learnt) for before, after in pairwise(made))
    assert once.state is not None and twice.state is not None


@pytest.mark.slow
def test_a_build_and_a_refresh_stop_when_answers_kept_from_them_say_so_and_tell_it(
    tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A refresh keeps answers of its own window only, of clusters that have no older answer."""
    tables = tomllib.loads(shipped_recipes()["tiny"].read_text())
    del tables["serve"], tables["demo"]
    tables["engine"] = {"name": "torch"}
    tables["distill"] = {"num_epochs": 40, "batch_tokens": 64, "validation": 0.25, "patience": 1}
    tables["refresh"]["distill"] = {}
    recipe = parse_recipe({"name": "r", **tables}, "r")
    with staged(tmp_path / "target") as directory:
        copytree(tiny_target, directory, dirs_exist_ok=True, ignore=ignore_patterns("manifest.json"))
    target = publish(tmp_path / "target", "target")
    answered = answer_all(target.path, None, prompts(9))
    rows = [Sample(f"row-{n}", "chat", [*one.prompt_ids], [*one.token_ids]) for n, one in enumerate(answered)]
    clusters = ["mixed", "mixed", "new", *(f"old {n}" for n in range(6))]
    with staged(tmp_path / "samples") as directory:
        named = (row._replace(cluster=name) for row, name in zip(rows, clusters, strict=True))
        write_samples(directory, "train", named)
    samples = publish(tmp_path / "samples", "samples")
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
    version = Version(kind="draft", number=1, sha256="0" * 64, tags={}, created_ms=0)
    pair = Pair(target=version, draft=version, target_files=target, draft_files=first)
    start = Start(version=version, files=first, state=None, evidence=Evidence.start(2, 1), going_on=False)
    train_challenger.fn(recipe, pair, start, samples, window)
    assert asked[num_looks:] and all(ids == ["row-2"] for ids in asked[num_looks:])
    runs = open_registry().store.client.search_runs([open_registry().store.experiment_id])
    told = [run.data.metrics for run in runs if "validation/looks" in run.data.metrics]
    assert [one["num_validated"] for one in told] == [1, 2]  # newest first
    assert all(one["validation/looks"] <= 40 and one["validation/tau"] >= 1 for one in told)
    log.close()
