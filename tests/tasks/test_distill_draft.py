import tomllib
from pathlib import Path

import pytest

from infra.artifacts import publish, staged
from models.drafts import retrieval, self_skip
from models.hidden import Sample
from models.layers.decoder import Sublayers
from models.recipe import parse_recipe, shipped_recipes
from tasks.distill_draft import distill_draft, untrained
from tasks.stages.samples import write_samples
from tests.models.drafts.answered import answer_all, prompts
from tests.models.drafts.hollow import make_hollow

SAMPLES = [Sample("1", "code", [3, 4], [5, 6]), Sample("2", "chat", [7], [8, 9])]


def test_a_new_store_holds_the_answers_for_training_and_a_refresh_adds_no_clients_text(
    tiny_target: Path, tmp_path: Path
) -> None:
    draft = untrained(retrieval.Params(), None, tiny_target, SAMPLES)
    assert draft.store.texts == [[3, 4, 5, 6], [7, 8, 9]]
    retrieval.save(draft, tmp_path)
    later = [Sample("3", "code", [10], [11, 12])]
    assert untrained(retrieval.Params(), tmp_path, tiny_target, later).store.texts == draft.store.texts


def test_a_family_that_is_searched_for_is_fitted_to_the_answers_for_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a target whose middle layers add nothing, all that they are is skipped."""
    monkeypatch.setenv("REDRAFT_HOME", str(tmp_path / "home"))
    tables = tomllib.loads(shipped_recipes()["tiny"].read_text())
    tables["engine"], tables["draft"] = {"name": "torch"}, {"name": "self_skip", "num_trials": 30}
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
