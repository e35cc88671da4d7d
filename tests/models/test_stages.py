"""The tables of the stages: a slip is named with its table, and what can't work is refused before anything runs."""

from typing import Any

import pytest

from models import catalog
from tests.models.changed import REFERENCE, TEXT, parsed, require_kept, require_refused

TEXTS = {"text": {"code": TEXT, "chat": TEXT}}


def test_a_recipe_without_stages_leaves_the_target_as_it_is() -> None:
    assert not parsed(TEXTS).changes_target


def test_a_stage_trains_with_the_keys_of_its_own_table_and_survives_json() -> None:
    recipe = require_kept(parsed({**TEXTS, "pretrain": {"num_epochs": 3, "learning_rate": 0.5}}))
    assert recipe.changes_target
    assert (recipe.pretrain.training.num_epochs, recipe.pretrain.training.learning_rate) == (3, 0.5)


NONE = {"method": {"name": "none"}, "domain": "code", "num_documents": 4}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pretrain": {"num_epoch": 1}}, r'unknown key "pretrain.num_epoch" \(did you mean "num_epochs"'),
        ({"pretrain": {"batch_tokens": 1}}, r'key "pretrain.batch_tokens"'),
        ({"pretrain": {"regimes": [{"name": "none"}]}}, r'key "pretrain.regimes.0": .*no method "none" in regimes'),
        *(
            ({table: {"method": {"name": "none"}}}, rf'key "{table}.method": .*no method "none" in {family}')
            for table, family in (("shrink",) * 2, ("prune",) * 2, ("quantize",) * 2, ("select",) * 2)
        ),
        ({"finetune": {"method": {"name": "none"}, "domain": "code"}}, r'"finetune.method": .*"none" in adapters'),
        ({"shrink": {}}, r'key "shrink.method" is missing'),
        ({"text.code.num_trian": 3}, r'unknown key "text.code.num_trian" \(did you mean "num_train"'),
        ({"text": None, "pretrain": {}}, r"\[pretrain\] works on text, so the recipe needs a table \[text.DOMAIN\]"),
        *(
            (
                {"shrink": {"method": {"name": name}}},
                "a shape is asked for by at least one of hidden_size, .*num_layers",
            )
            for name in ("width", "sheared")
        ),
    ],
)
def test_a_slip_is_named_with_its_table(changes: dict[str, Any], message: str) -> None:
    require_refused({"text": {"code": {**TEXT}, "chat": TEXT}, **changes}, f"r: .*{message}")


LOW_RANK = {"name": "low_rank", "share": 0.5}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quantize.method": {"name": "nf4"}}, r'quantize.*of "nf4" is not served: .* "qlora" .*int8'),
        ({"quantize.method": {"name": "llm_int8"}}, r"quantize.*int8_dynamic is served everywhere"),
        ({"quantize.method": {"name": "kv_cache"}}, r'quantize.*kv_cache_dtype = "fp8"'),
        ({"quantize.method": {"name": "bitnet"}}, r"quantize.*vLLM has no layer for it"),
        ({"finetune.method": {"name": "bottleneck"}}, r'finetune.*"bottleneck" can\'t be merged: .*lora'),
        ({"finetune.domain": "cod"}, r'\[finetune\]: key "domain": no \[text.cod\] \(did you mean "code"\?\)'),
        ({"select.num_documents": 500}, r'\[select\]: key "num_documents" is 500, the pool of \[text\] has 120'),
        ({"select.method": {"name": "acceptance_gap"}}, r'select.*"acceptance_gap" asks .* needs a table proxy'),
        ({"select.num_rounds": 61}, r"select.*num_documents 60 is less than num_rounds 61"),
        ({"shrink.method": {"name": "vocabulary", "vocab_size": 99}}, r'shrink.*"vocabulary" leaves .* tokenizer'),
        ({"prune.pattern": "4:2"}, r"prune.*4:2 would keep all weights"),
        ({"prune.pattern": 1.5}, r'prune.*pattern.sparsity"'),
        ({"pretrain.regimes": [{"name": "iterative_magnitude"}, {"name": "packing"}]}, r"pretrain.*a loop of its own"),
        (
            {"shrink.method": LOW_RANK, "quantize": None},
            r'in \[prune\] raises the low rank of "low_rank" in \[shrink\]',
        ),
        (
            {"shrink.method": LOW_RANK, "prune": None},
            r'in \[quantize\] raises the low rank of "low_rank" in \[shrink\]',
        ),
    ],
)
def test_what_can_not_work_is_refused_before_the_first_stage(changes: dict[str, Any], message: str) -> None:
    require_refused({"select.proxy": None, **changes}, f"(?s){message}", "full-chain-tiny")


def test_factors_are_refused_where_the_engine_multiplies_by_matrices_alone() -> None:
    factors = {"prune": None, "quantize": None, "shrink.method": {**LOW_RANK, "keep": "factors"}}
    require_refused(factors, r'"vllm" multiplies by whole matrices: keep = "matrices"', "full-chain-tiny")
    taken = parsed(factors | {"engine": REFERENCE["engine"], "serve": None}, "full-chain-tiny")
    assert taken.shrink.method.keep == "factors"


def test_finetuning_learns_at_the_methods_own_rate_unless_the_recipe_says_another() -> None:
    changes = {"finetune.learning_rate": None, "finetune.method": {"name": "bitfit"}}
    recipe = require_kept(parsed(changes, "full-chain-tiny"))
    assert recipe.finetune.training.learning_rate == catalog.load("adapters", "bitfit").LEARNING_RATE
    own = parsed(changes | {"finetune.learning_rate": 0.5}, "full-chain-tiny")
    assert own.finetune.training.learning_rate == 0.5


LORA = {"method": {"name": "lora"}, "domain": "code"}


@pytest.mark.parametrize(
    ("second", "regimes", "message"),
    [
        ({"domain": "chta"}, [], r'key "second.domain": no \[text.chta\] \(did you mean "chat"\?\)'),
        ({"domain": "code"}, [], 'second.domain is "code", which is the first task\'s'),
        ({"domain": "chat", "weight": -1}, [], r'key "finetune.second.weight": .*got -1'),
        ({"domain": "chat"}, [{"name": "iterative_magnitude"}], "is a loop of its own, which has no second task"),
    ],
)
def test_a_second_task_that_can_not_be_learnt_is_refused(
    second: dict[str, Any], regimes: list[dict[str, Any]], message: str
) -> None:
    require_refused({**TEXTS, "finetune": {**LORA, "regimes": regimes, "second": second}}, message)


def test_a_second_task_weighs_as_much_as_the_first_unless_it_says_otherwise() -> None:
    recipe = require_kept(parsed({**TEXTS, "finetune": {**LORA, "second": {"domain": "chat"}}}))
    assert (recipe.finetune.second.domain, recipe.finetune.second.weight) == ("chat", 1.0)


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
def test_a_regime_that_can_not_train_with_an_adapter_is_refused_by_both_names(
    method: dict[str, Any], regime: dict[str, Any], message: str
) -> None:
    table, alone = {"method": method, "domain": "code"}, {**TEXTS, "pretrain": {"regimes": [regime]}}
    told = rf'"{regime["name"]}" in \[finetune\] {message}.* "{method["name"]}" in \[finetune\]'
    require_refused({**TEXTS, "finetune": {**table, "regimes": [regime]}}, told)
    parsed({**alone, "finetune": table})


def test_gates_that_fold_nothing_train_with_an_adapter() -> None:
    gate = {"name": "layer_skip_gate", "fold": False}
    table = {**LORA, "method": {"name": "lora", "layers": ALL_LINEAR}, "regimes": [gate]}
    assert not parsed({**TEXTS, "finetune": table}).finetune.regimes[0].fold
