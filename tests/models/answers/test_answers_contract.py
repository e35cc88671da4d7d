import tomllib

import pytest
import torch

from models import catalog
from models.answers import RolloutParams
from models.core.learning.hidden import Sample
from models.recipe import Recipe, parse_recipe, shipped_recipes

SAMPLES = [
    Sample("a", "d", [1, 2], [3, 4, 5], rejected=[2]),
    Sample("b", "rationale", [1], list(range(3, 43)), rejected=[]),
]
NAMES = catalog.names("answers")
WRITTEN = [name for name in NAMES if catalog.load("answers", name).WRITES]


def recipe(draft: str, **distill: object) -> Recipe:
    tables = tomllib.loads(shipped_recipes()["tiny"].read_text())
    refresh = distill.pop("refresh", {})
    del tables["serve"], tables["demo"]
    tables["engine"], tables["draft"] = {"name": "torch"}, {"name": draft}
    tables["distill"] = distill
    tables["traffic"]["rationale"] = tables["traffic"]["chat"]
    return parse_recipe({"name": "r", **tables, "refresh": {**tables["refresh"], "distill": refresh}}, "r")


@pytest.mark.parametrize("name", NAMES)
def test_it_says_who_writes_and_what_counts(name: str) -> None:
    source = catalog.load("answers", name)
    assert source.PAPER
    assert source.WRITES == hasattr(source, "by_draft") == issubclass(source.Params, RolloutParams)
    assert hasattr(source, "weigh") or not source.LOGGED


@pytest.mark.parametrize("name", WRITTEN)
def test_writers_are_named_for_each_token_and_the_seed_decides(name: str) -> None:
    source = catalog.load("answers", name)
    lengths = [len(one.completion_ids) for one in SAMPLES] * 20
    first, same, other = (
        source.by_draft(lengths, source.Params(), torch.Generator().manual_seed(seed)) for seed in (0, 0, 1)
    )
    assert [length if of is None else len(of) for of, length in zip(first, lengths, strict=True)] == lengths
    assert first == same
    assert any(of is not None and any(of) for of in first)
    assert first != other or all(of is not None and all(of) for of in first)


@pytest.mark.parametrize("name", [name for name in NAMES if hasattr(catalog.load("answers", name), "weigh")])
def test_weights_are_of_mean_1_over_what_can_be_drafted(name: str) -> None:
    source = catalog.load("answers", name)
    weights = source.weigh(SAMPLES, source.Params())
    assert [len(of) for of in weights] == [len(one.completion_ids) for one in SAMPLES]
    drafted = [weight for of in weights for weight in of[1:]]
    assert sum(drafted) / len(drafted) == pytest.approx(1)
    assert min(drafted) >= 0


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_names_it_for_a_draft_that_can_learn_from_it(name: str) -> None:
    found = recipe("eagle3", refresh={"answers": {"name": name}})
    assert found.refresh_distill().answers == catalog.load("answers", name).Params()
    assert Recipe.model_validate_json(found.model_dump_json()) == found


@pytest.mark.parametrize("name", [name for name in NAMES if name != "target"])
def test_a_draft_without_weights_takes_the_targets_answers_alone(name: str) -> None:
    recipe("ngram", answers={"name": "target"})
    with pytest.raises(ValueError, match=f'answers "{name}" are for drafts that are trained'):
        recipe("ngram", refresh={"answers": {"name": name}})


def test_a_first_draft_has_no_log_to_learn_from() -> None:
    with pytest.raises(ValueError, match=r"which a first draft does not have; .* \[refresh\] distill = \{ answers"):
        recipe("eagle3", answers={"name": "rejected"})


@pytest.mark.parametrize("name", WRITTEN)
def test_the_drafts_own_tokens_are_no_label(name: str) -> None:
    for where in ({"answers": {"name": name}}, {"refresh": {"answers": {"name": name}}}):
        with pytest.raises(ValueError, match=f'answers "{name}" hold tokens of .* "cross_entropy" would learn them'):
            recipe("medusa", **where)
    recipe("medusa", answers={"name": name}, loss={"name": "forward_kl"})
