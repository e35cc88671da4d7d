"""The tables of the stages: a slip is named with its table, and what can't work is refused before anything runs."""

import tomllib

import pytest

from flows.recipe import shipped_recipes
from tasks.recipe import Recipe, parse_recipe

TEXT = {"source": {"name": "synthetic", "count": 60}, "num_train": 30, "num_held_out": 10}


@pytest.fixture
def tables() -> dict:
    """Return the tiny recipe's tables with a text and no stage."""
    tables = tomllib.loads(shipped_recipes()["tiny"].read_text())
    return {"name": "r", **tables, "text": {"code": TEXT, "chat": TEXT}}


def test_a_recipe_without_stages_leaves_the_target_as_it_is(tables) -> None:
    assert not parse_recipe(tables, "r").changes_target


def test_a_stage_trains_with_the_keys_of_its_own_table_and_survives_json(tables) -> None:
    recipe = parse_recipe({**tables, "pretrain": {"num_epochs": 3, "learning_rate": 0.5}}, "r")
    assert recipe.changes_target
    assert (recipe.pretrain.training.num_epochs, recipe.pretrain.training.learning_rate) == (3, 0.5)
    assert Recipe.model_validate_json(recipe.model_dump_json()) == recipe


@pytest.mark.parametrize(
    ("name", "table", "message"),
    [
        ("pretrain", {"num_epoch": 1}, r'unknown key "num_epoch" \(did you mean "num_epochs"'),
        ("pretrain", {"batch_tokens": 1}, r'key "batch_tokens"'),
        ("pretrain", {"regimes": [{"name": "none"}]}, r'key "regimes.0": .*no method "none" in regimes'),
        ("shrink", {"method": {"name": "none"}}, r'key "method": .*no method "none" in shrink'),
        ("prune", {"method": {"name": "none"}}, r'key "method": .*no method "none" in prune'),
        ("quantize", {"method": {"name": "none"}}, r'key "method": .*no method "none" in quantize'),
        ("finetune", {"method": {"name": "none"}, "domain": "code"}, r'key "method": .*no method "none" in adapters'),
        ("select", {"method": {"name": "none"}, "num_documents": 4}, r'key "method": .*no method "none" in select'),
        ("shrink", {}, r'key "method" is missing'),
    ],
)
def test_a_slip_is_named_with_its_table(tables, name, table, message) -> None:
    with pytest.raises(ValueError, match=rf"r: \[{name}\]: {name}: {message}"):
        parse_recipe({**tables, name: table}, "r")


def test_a_stage_that_is_no_table_is_refused(tables) -> None:
    with pytest.raises(ValueError, match=r"r: \[shrink\]: wanted a table, got 3"):
        parse_recipe({**tables, "shrink": 3}, "r")


def test_a_slip_in_a_text_is_named_with_its_domain(tables) -> None:
    tables["text"] = {"code": {**TEXT, "num_trian": 3}}
    with pytest.raises(ValueError, match=r'r: \[text.code\]: text: unknown key "num_trian" \(did you mean "num_train"'):
        parse_recipe(tables, "r")


def test_a_stage_without_text_is_refused(tables) -> None:
    del tables["text"]
    with pytest.raises(ValueError, match=r"\[pretrain\] works on text, so the recipe needs a table \[text.DOMAIN\]"):
        parse_recipe({**tables, "pretrain": {}}, "r")
