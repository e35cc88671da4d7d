"""The tables of the stages: a slip is named with its table, and what can't work is refused before anything runs."""

import tomllib

import pytest

from models import catalog
from models.recipe import Recipe, parse_recipe, shipped_recipes

TEXT = {"source": {"name": "synthetic", "count": 60}, "num_train": 30, "num_held_out": 10}


@pytest.fixture
def tables(tables) -> dict:
    """Return the tiny recipe's tables with a text and no stage."""
    return {**tables, "text": {"code": TEXT, "chat": TEXT}}


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
        ("pretrain", {"num_epoch": 1}, r'unknown key "pretrain.num_epoch" \(did you mean "num_epochs"'),
        ("pretrain", {"batch_tokens": 1}, r'key "pretrain.batch_tokens"'),
        ("pretrain", {"regimes": [{"name": "none"}]}, r'key "pretrain.regimes.0": .*no method "none" in regimes'),
        ("shrink", {"method": {"name": "none"}}, r'key "shrink.method": .*no method "none" in shrink'),
        ("prune", {"method": {"name": "none"}}, r'key "prune.method": .*no method "none" in prune'),
        ("quantize", {"method": {"name": "none"}}, r'key "quantize.method": .*no method "none" in quantize'),
        (
            "finetune",
            {"method": {"name": "none"}, "domain": "code"},
            r'key "finetune.method": .*"none" in adapters',
        ),
        (
            "select",
            {"method": {"name": "none"}, "num_documents": 4},
            r'key "select.method": .*"none" in select',
        ),
        ("shrink", {}, r'key "shrink.method" is missing'),
    ],
)
def test_a_slip_is_named_with_its_table(tables, name, table, message) -> None:
    with pytest.raises(ValueError, match=f"r: {message}"):
        parse_recipe({**tables, name: table}, "r")


def test_a_slip_in_a_text_is_named_with_its_domain(tables) -> None:
    tables["text"] = {"code": {**TEXT, "num_trian": 3}}
    with pytest.raises(ValueError, match=r'r: unknown key "text.code.num_trian" \(did you mean "num_train"'):
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
        ("quantize", "method", {"name": "nf4"}, 'of "nf4" is not served: .* "qlora" .* choose one of: .*int8'),
        ("quantize", "method", {"name": "llm_int8"}, "bitsandbytes; int8_dynamic is served everywhere"),
        ("quantize", "method", {"name": "kv_cache"}, 'engine rounds its cache by itself.*kv_cache_dtype = "fp8"'),
        ("quantize", "method", {"name": "bitnet"}, "vLLM has no layer for it; redraft compare quantize trains"),
        ("finetune", "method", {"name": "bottleneck"}, '"bottleneck" can\'t be merged: .*choose one of: .*lora'),
        ("finetune", "domain", "cod", r'key "domain": no \[text.cod\] \(did you mean "code"\?\)'),
        ("select", "num_documents", 500, r'key "num_documents" is 500, the pool of \[text\] has 120'),
        ("select", "method", {"name": "acceptance_gap"}, '"acceptance_gap" asks .* needs a table proxy'),
        ("shrink", "method", {"name": "vocabulary", "vocab_size": 99}, '"vocabulary" leaves .* without a tokenizer'),
        ("select", "num_rounds", 61, "num_documents 60 is less than num_rounds 61"),
        ("prune", "pattern", "4:2", "4:2 would keep all weights"),
        ("prune", "pattern", 1.5, 'pattern.sparsity"'),
        ("pretrain", "regimes", [{"name": "iterative_magnitude"}, {"name": "packing"}], "is a loop of its own"),
    ],
)
def test_what_can_not_work_is_refused_before_the_first_stage(full, table, key, value, message) -> None:
    full["select"].pop("proxy")
    full[table][key] = value
    with pytest.raises(ValueError, match=rf'(?s)(\[{table}\]|key "{table}).*{message}'):
        parse_recipe(full, "r")


@pytest.mark.parametrize("later", ["prune", "quantize"])
def test_a_low_rank_that_a_later_stage_would_lose_is_refused(full, later) -> None:
    full["shrink"]["method"] = {"name": "low_rank", "share": 0.5}
    del full[{"prune": "quantize", "quantize": "prune"}[later]]
    with pytest.raises(ValueError, match=rf'in \[{later}\] raises the low rank of "low_rank" in \[shrink\]; choose'):
        parse_recipe(full, "r")


def test_factors_are_refused_where_the_engine_multiplies_by_matrices_alone(full) -> None:
    del full["prune"], full["quantize"]
    full["shrink"]["method"] = {"name": "low_rank", "share": 0.5, "keep": "factors"}
    with pytest.raises(ValueError, match=r'"vllm" multiplies by whole matrices: keep = "matrices", or \[engine\]'):
        parse_recipe(full, "r")
    full["engine"] = {"name": "torch", "num_draft_tokens": 2}
    del full["serve"]
    assert parse_recipe(full, "r").shrink.method.keep == "factors"


def test_finetuning_learns_at_the_methods_own_rate_unless_the_recipe_says_another(full) -> None:
    del full["finetune"]["learning_rate"]
    full["finetune"]["method"] = {"name": "bitfit"}
    recipe = parse_recipe(full, "r")
    assert recipe.finetune.training.learning_rate == catalog.load("adapters", "bitfit").LEARNING_RATE
    assert Recipe.model_validate_json(recipe.model_dump_json()) == recipe
    full["finetune"]["learning_rate"] = 0.5
    assert parse_recipe(full, "r").finetune.training.learning_rate == 0.5


@pytest.mark.parametrize(
    ("second", "regimes", "message"),
    [
        ({"domain": "chta"}, [], r'key "second.domain": no \[text.chta\] \(did you mean "chat"\?\)'),
        ({"domain": "code"}, [], 'second.domain is "code", which is the first task\'s; name another'),
        ({"domain": "chat", "weight": -1}, [], r'key "finetune.second.weight": .*got -1'),
        ({"domain": "chat"}, [{"name": "iterative_magnitude"}], "is a loop of its own, which has no second task"),
    ],
)
def test_a_second_task_that_can_not_be_learnt_is_refused(tables, second, regimes, message) -> None:
    table = {"method": {"name": "lora"}, "domain": "code", "regimes": regimes}
    with pytest.raises(ValueError, match=message):
        parse_recipe({**tables, "finetune": {**table, "second": second}}, "r")
    recipe = parse_recipe({**tables, "finetune": {**table, "regimes": [], "second": {"domain": "chat"}}}, "r")
    assert (recipe.finetune.second.domain, recipe.finetune.second.weight) == ("chat", 1.0)
    assert Recipe.model_validate_json(recipe.model_dump_json()) == recipe


ALL_LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@pytest.mark.parametrize(
    ("method", "regime", "message"),
    [
        ({"name": "qlora"}, {"name": "early_bird"}, "rewrites the frozen weights of"),
        ({"name": "lora", "layers": ALL_LINEAR}, {"name": "layer_skip_gate"}, "rewrites the frozen weights of"),
        ({"name": "last_layers"}, {"name": "iterative_magnitude"}, "rewrites the frozen weights of"),
        ({"name": "bitfit"}, {"name": "predictive_sign_gradient"}, "changes gradients of weights, of which .* none"),
    ],
)
def test_a_regime_that_can_not_train_with_an_adapter_is_refused_by_both_names(tables, method, regime, message) -> None:
    table = {"method": method, "domain": "code", "regimes": [regime]}
    with pytest.raises(
        ValueError, match=rf'"{regime["name"]}" in \[finetune\] {message}.* "{method["name"]}" in \[finetune\]'
    ):
        parse_recipe({**tables, "finetune": table}, "r")
    parse_recipe({**tables, "pretrain": {"regimes": [regime]}, "finetune": {**table, "regimes": []}}, "r")


def test_gates_that_fold_nothing_train_with_an_adapter(tables) -> None:
    gate = {"name": "layer_skip_gate", "fold": False}
    table = {"method": {"name": "lora", "layers": ALL_LINEAR}, "domain": "code", "regimes": [gate]}
    assert not parse_recipe({**tables, "finetune": table}, "r").finetune.regimes[0].fold


@pytest.mark.parametrize("method", [{"name": "width"}, {"name": "sheared"}])
def test_a_shape_that_nothing_is_asked_of_is_refused(tables, method) -> None:
    with pytest.raises(ValueError, match="a shape is asked for by at least one of hidden_size, .*, num_layers"):
        parse_recipe({**tables, "shrink": {"method": method}}, "r")
