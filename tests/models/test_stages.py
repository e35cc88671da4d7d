"""The tables of the stages: a slip is named with its table, and what can't work is refused before anything runs."""

import tomllib

import pytest

from models.recipe import Recipe, parse_recipe, shipped_recipes

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


@pytest.fixture
def full() -> dict:
    """Return the tables of a recipe with every stage."""
    return {"name": "r", **tomllib.loads(shipped_recipes()["full-chain-tiny"].read_text())}


@pytest.mark.parametrize(
    ("table", "key", "value", "message"),
    [
        ("quantize", "method", {"name": "nf4"}, 'no engine serves "nf4"; choose one of: .*int8'),
        ("finetune", "method", {"name": "bottleneck"}, '"bottleneck" can\'t be merged .*choose one of: .*lora'),
        ("finetune", "domain", "cod", r'key "domain": no \[text.cod\] \(did you mean "code"\?\)'),
        ("select", "num_documents", 500, r'key "num_documents" is 500, the pool of \[text\] has 120'),
        ("select", "num_rounds", 61, "num_documents 60 is less than num_rounds 61"),
        ("prune", "pattern", "4:2", "4:2 would keep all weights"),
        ("prune", "pattern", 1.5, 'key "pattern.sparsity"'),
        ("pretrain", "regimes", [{"name": "iterative_magnitude"}, {"name": "packing"}], "is a loop of its own"),
    ],
)
def test_what_can_not_work_is_refused_before_the_first_stage(full, table, key, value, message) -> None:
    full[table][key] = value
    with pytest.raises(ValueError, match=rf"(?s)\[{table}\].*{message}"):
        parse_recipe(full, "r")
