"""What every source of answers offers, and who may learn from which."""

import tomllib
from types import ModuleType

import pytest
import torch

from models import catalog
from models.answers import RolloutParams
from models.core.drafting.draft_families import class_of, family_named
from models.core.learning.hidden import Sample
from models.recipe import Recipe, parse_recipe, shipped_recipes

SAMPLES = [
    Sample("a", "d", [1, 2], [3, 4, 5], rejected=[2]),
    Sample("b", "rationale", [1], list(range(3, 43)), rejected=[]),
]
NAMES = catalog.names("answers")
WRITTEN = [name for name in NAMES if catalog.load("answers", name).WRITES]


@pytest.fixture(params=NAMES)
def source(request: pytest.FixtureRequest) -> ModuleType:
    return catalog.load("answers", request.param)


def recipe(draft: str, **distill: object) -> Recipe:
    tables = tomllib.loads(shipped_recipes()["tiny"].read_text())
    refresh = distill.pop("refresh", {})
    del tables["serve"], tables["demo"]
    tables["engine"], tables["draft"] = {"name": "torch"}, {"name": draft}
    tables["distill"] = distill
    tables["traffic"]["rationale"] = tables["traffic"]["chat"]
    return parse_recipe({"name": "r", **tables, "refresh": {**tables["refresh"], "distill": refresh}}, "r")


def test_it_says_who_writes_and_what_counts(source: ModuleType) -> None:
    assert source.PAPER
    assert source.WRITES == hasattr(source, "by_draft") == issubclass(source.Params, RolloutParams)
    assert hasattr(source, "weigh") or not source.LOGGED


def test_writers_are_named_for_each_token_and_the_seed_decides(source: ModuleType) -> None:
    if not source.WRITES:
        return
    lengths = [len(one.completion_ids) for one in SAMPLES] * 20
    first, same, other = (
        source.by_draft(lengths, source.Params(), torch.Generator().manual_seed(seed)) for seed in (0, 0, 1)
    )
    assert [length if of is None else len(of) for of, length in zip(first, lengths, strict=True)] == lengths
    assert first == same
    assert any(of is not None and any(of) for of in first)
    assert first != other or all(of is not None and all(of) for of in first)


def test_weights_are_of_mean_1_over_what_can_be_drafted(source: ModuleType) -> None:
    if not hasattr(source, "weigh"):
        return
    weights = source.weigh(SAMPLES, source.Params())
    assert [len(of) for of in weights] == [len(one.completion_ids) for one in SAMPLES]
    drafted = [weight for of in weights for weight in of[1:]]
    assert sum(drafted) / len(drafted) == pytest.approx(1)
    assert min(drafted) >= 0


def test_a_recipe_names_it_for_a_draft_that_can_learn_from_it(source: ModuleType) -> None:
    name = source.__name__.rpartition(".")[2]
    found = recipe("eagle3", refresh={"answers": {"name": name}})
    assert found.refresh_distill().answers == source.Params()  # type: ignore[attr-defined]
    assert Recipe.model_validate_json(found.model_dump_json()) == found


def test_a_draft_without_weights_takes_the_targets_answers_alone(source: ModuleType) -> None:
    name = source.__name__.rpartition(".")[2]
    if name == "target":
        recipe("ngram", answers={"name": name})
        return
    with pytest.raises(ValueError, match=f'answers "{name}" are for drafts that are trained'):
        recipe("ngram", refresh={"answers": {"name": name}})


def test_a_first_draft_has_no_log_to_learn_from() -> None:
    with pytest.raises(ValueError, match=r"which a first draft does not have; .* \[refresh\] distill = \{ answers"):
        recipe("eagle3", answers={"name": "rejected"})


@pytest.mark.parametrize("name", WRITTEN)
def test_the_drafts_own_tokens_are_no_label(name: str) -> None:
    for where in ({"answers": {"name": name}}, {"refresh": {"answers": {"name": name}}}):
        with pytest.raises(
            ValueError, match=f'answers "{name}" hold tokens of .* loss "cross_entropy" would learn them'
        ):
            recipe("medusa", **where)
    recipe("medusa", answers={"name": name}, loss={"name": "forward_kl"})


def test_every_family_says_how_it_is_trained() -> None:
    names = ("eagle", "eagle3", "medusa")
    losses = {name: class_of(family_named(name)).procedure.loss.name for name in names}
    assert losses == {
        "eagle": "feature_regression",
        "eagle3": "forward_kl",
        "medusa": "cross_entropy",
    }
