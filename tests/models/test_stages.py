"""The tables of the stages: a slip is named with its table, and what can't work is refused before anything runs."""

from typing import Any

import pytest

from models import catalog
from models.serving import Capture, Reasoning, Structured
from tests.models.changed import REFERENCE, TEXT, TORCH, UNTRAINED, parsed, require_kept, require_refused

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


@pytest.mark.parametrize("served", ["serve.poll_s", "demo.stock", "serve.tool_parser"])
def test_an_engine_without_an_endpoint_goes_with_no_table_of_one(served: str) -> None:
    values = {"serve.poll_s": 3, "demo.stock": False, "serve.tool_parser": "hermes"}
    alone = {name: None for name in ("serve", "demo") if not served.startswith(name)}
    require_refused({**alone, "engine": TORCH, served: values[served]}, 'engine "torch" has no endpoint: leave out')
    with pytest.raises(ValueError, match='engine "torch" has no endpoint'):
        parsed(REFERENCE).require_served()
    parsed({}).require_served()


JOINED = {"lookup": {"num_tokens": 4}, "lengths": {"name": "goodput"}}


@pytest.mark.parametrize(
    ("draft", "ways", "message"),
    [
        ("ngram", {"trees": {"name": "dynamic"}}, "Ngram can't go on from any node of a tree"),
        ("jacobi", {"lengths": {"name": "pearl"}}, "pearl drafts while the target reads; Jacobi can't go on"),
        ("early_exit", {"lengths": {"name": "pearl"}}, "EarlyExit runs layers of the target"),
        ("suffix", {"lengths": {"name": "confidence"}}, "Suffix drafts in one go; .* confidence would never be asked"),
        ("token_recycling", {"lengths": {"name": "specdec_pp"}}, "specdec_pp would never be asked"),
        ("eagle3", {"nested_confidence": 0.5}, "Eagle3 has no other drafts nested in it"),
        ("lm", {"nested_confidence": 0.5}, "Lm has no other drafts nested in it"),
        ("prompt_tokens", JOINED, "PromptTokens has the target read vectors of its own"),
        ("eagle3", {"lengths": {"name": "specdec_pp", "rejection_weight": 2}}, '"rejection_weight" would do nothing'),
        ("eagle3", {"verify_greedy": {"name": "judge", "bad_weight": 2}}, 'key "bad_weight" would do nothing'),
        ("eagle3", {"lengths": {"name": "goodput", "margin": 0.5}}, "goodput: key .margin. would do nothing"),
    ],
)
def test_ways_of_drafting_that_a_family_can_not_be_drafted_with_are_refused_before_the_engine_starts(
    draft: str, ways: dict[str, Any], message: str
) -> None:
    drafting = {"engine": {**TORCH, **ways}, "draft": {"name": draft}, "distill": {}, "refresh": None}
    require_refused(REFERENCE | drafting, message)


def test_a_nested_draft_and_policies_that_read_their_keys_are_taken() -> None:
    drafting = {**TORCH, "nested_confidence": 0.5, "lengths": {"name": "confidence", "threshold": 0.3}}
    assert parsed(REFERENCE | {"engine": drafting, "draft": {"name": "lm", "nested": [1]}}).draft.nested == (1,)
    joined = {**TORCH, "lookup": {"num_tokens": 4}, "lengths": {"name": "goodput", "margin": 0.5}}
    assert parsed(REFERENCE | {"engine": joined}).engine.lengths.margin == 0.5


@pytest.mark.parametrize(
    ("draft", "engine", "message"),
    [
        ({"name": "lm", "nested": [1]}, {}, r"vLLM drafts with all layers; got nested \[1\]"),
        ({"name": "ngram"}, {"lookup": {"shortest": 2}}, r'\[engine\]: key "lookup" would do nothing, since vLLM dr'),
        ({"name": "ngram"}, {"lengths": {"name": "fixed"}}, 'key "lengths" would do nothing'),
        ({"name": "ngram"}, {"draft_sample_method": "greedy"}, 'key "draft_sample_method" would do nothing'),
    ],
)
def test_what_vllm_would_not_do_with_a_draft_is_refused(
    draft: dict[str, Any], engine: dict[str, Any], message: str
) -> None:
    require_refused({**UNTRAINED, "draft": draft, "engine": {"name": "vllm", **engine}}, message)


def test_hidden_states_are_captured_only_where_a_draft_reads_them() -> None:
    captures = {"serve.capture": {"share": 0.5}}
    assert parsed(captures).serve.capture.is_on
    require_refused({**captures, "draft": {"name": "lm"}}, r"\[serve\] capture: a draft of family lm reads no layers")


@pytest.mark.parametrize("of", ["distill", "refresh.distill"])
@pytest.mark.parametrize(
    ("engine", "distill", "message"),
    [
        ({}, {"lengths": {"name": "specdec_pp"}}, 'fits a head that engine "vllm" would not read'),
        (REFERENCE, {"lengths": {"name": "specdec_pp"}}, '"torch" would not read: it decodes by chain, fixed, greedy'),
        (REFERENCE, {"verify": {"name": "judge", "marks": "m.jsonl"}}, "verify = .judge. fits a head that"),
    ],
)
def test_a_head_that_the_engine_would_not_read_is_not_fit(
    engine: dict[str, Any], distill: dict[str, Any], message: str, of: str
) -> None:
    require_refused({**engine, of: distill}, message)


def test_a_head_that_the_engine_reads_is_fit() -> None:
    engine = {**TORCH, "lengths": {"name": "specdec_pp", "threshold": 0.2}, "verify_greedy": {"name": "judge"}}
    distill = {"lengths": {"name": "specdec_pp", "num_layers": 1}, "verify": {"name": "judge", "marks": "m.jsonl"}}
    assert len(parsed(REFERENCE | {"engine": engine, "distill": distill}).distill.heads) == 2


@pytest.mark.parametrize(
    ("draft", "key", "value", "message"),
    [
        ("ngram", "distill", {"num_epochs": 2}, r'\[distill\]: key "num_epochs" would do nothing, since .* no weights'),
        ("ngram", "refresh.distill", {"batch_tokens": 9}, r'\[refresh\] distill: key "batch_tokens" would do nothing'),
        ("lm", "distill", {"step_decay": 0.5}, r'"step_decay" would do nothing, since .* lm is unrolled once'),
        ("lm", "refresh.distill", {"follow": "all"}, r'\[refresh\] distill: key "follow" would do nothing'),
        ("eagle3", "distill", {"patience": 3}, r'\[distill\]: key "patience" would do nothing, since validation is 0'),
    ],
)
def test_keys_of_training_that_a_draft_is_not_trained_by_are_refused(
    draft: str, key: str, value: dict[str, Any], message: str
) -> None:
    require_refused({"draft": {"name": draft}, "distill": {}, "refresh.distill": {}, key: value}, message)


def test_patience_of_a_build_or_a_refresh_alone_is_taken() -> None:
    taken = parsed({"distill": {"validation": 0.2, "patience": 3}, "refresh.distill": {"validation": 0.0}})
    assert (taken.distill.patience, taken.refresh_distill().validation) == (3, 0.0)


def stage(name: str, key: str = "", value: object = 2, **settings: Any) -> dict[str, Any]:
    pattern = {"pattern": 0.5} if name in catalog.names("prune") else {}
    return {"method": {"name": name, **settings}, **pattern} | ({key: value} if key else {})


SELECT = stage("random", key="num_documents", value=9)
UNREAD = r"\[select\] chooses text, and no later stage"


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({"select": SELECT}, UNREAD),
        ({"select": SELECT, "prune": stage("magnitude")}, UNREAD),
        ({"select": SELECT, "shrink": stage("depth", num_layers=1, keep="spread")}, UNREAD),
        (
            {"select": SELECT | stage("kcenter", key="num_epochs"), "prune": stage("wanda")},
            r'\[select\]: key "num_epochs" would do nothing, since kcenter trains no proxy',
        ),
        ({"prune": stage("magnitude", key="num_documents")}, r'\[prune\]: key "num_documents" would do'),
        ({"prune": stage("magnitude", key="max_length")}, r'\[prune\]: key "max_length" would do nothing'),
        ({"shrink": stage("depth", num_layers=1, key="learning_rate")}, r'"learning_rate" .* depth only calibrates'),
        ({"quantize": stage("gptq", group_size=32, key="num_epochs")}, r'"num_epochs" .* gptq only calibrates'),
        ({"quantize": stage("int8_dynamic", key="num_documents")}, r'"num_documents" .* int8_dynamic reads no text'),
        ({"quantize": stage("qat", group_size=32, key="num_documents")}, r'"num_documents" .* qat only trains'),
    ],
)
def test_keys_of_stages_that_neither_train_nor_calibrate_are_refused(tables: dict[str, Any], message: str) -> None:
    require_refused({"text": {"code": TEXT}, **tables}, message)


@pytest.mark.parametrize(
    ("table", "value"),
    [
        ("pretrain", {}),
        ("prune", stage("wanda", key="num_documents", value=4)),
        ("quantize", stage("qat", group_size=32, key="num_epochs")),
        ("quantize", stage("int8_dynamic") | {"exceptions": {"*.down_proj": {"name": "int8_static"}}}),
    ],
)
def test_text_is_selected_for_a_stage_that_reads_it(table: str, value: dict[str, Any]) -> None:
    select = {"method": {"name": "kcenter"}, "num_documents": 9}
    assert parsed({"text": {"code": TEXT}, "select": select, table: value}).select is not None


@pytest.mark.parametrize(
    ("family", "name", "settings", "key"),
    [
        ("drafts", "self_skip", {"window": 9}, "window"),
        ("drafts", "dream", {"image_share": 0.1}, "image_share"),
        ("quantize", "llm_int8", {"decompose": False, "threshold": 1.0}, "threshold"),
        ("regimes", "dorefa", {"activation_bits": 32, "activation_clip": 1.0}, "activation_clip"),
        ("regimes", "layer_dropout", {"exit_scale": 0.0, "rotation": 3}, "rotation"),
        ("regimes", "lognormal_gradient", {"num_bits": 32, "sparsity": 0.5, "scale": "maximum"}, "scale"),
        ("shrink", "depth", {"num_layers": 1, "keep": "spread", "num_documents": 3}, "num_documents"),
        ("sources", "reasoned", {"path": "a.jsonl", "task": "answer", "instruction": "Say: "}, "instruction"),
        ("targets", "pretrained", {"path": ".", "revision": "v2"}, "revision"),
    ],
)
def test_a_key_that_another_of_its_method_makes_pointless_is_refused(
    family: str, name: str, settings: dict[str, Any], key: str
) -> None:
    with pytest.raises(ValueError, match=f'{name}: key "{key}" would do nothing, since'):
        catalog.parse(family, {"name": name, **settings})


@pytest.mark.parametrize(
    ("table", "settings", "key"),
    [
        (Structured, {"enabled": False, "max_depth": 9}, "max_depth"),
        (Capture, {"keep_days": 1}, "keep_days"),
        (Reasoning, {"engine": {"name": "vllm"}}, "engine"),
        (Reasoning, {"model": ".", "engine": {"name": "torch", "trees": {"name": "dynamic"}}}, "trees"),
    ],
)
def test_settings_of_what_is_off_are_refused(table: Any, settings: dict[str, Any], key: str) -> None:
    with pytest.raises(ValueError, match=f'key "{key}" would do nothing, since'):
        table(**settings)


def test_settings_of_what_is_on_are_taken() -> None:
    assert Structured(enabled=True, max_depth=9).max_depth == 9
    assert Capture(share=1, keep_days=1).keep_days == 1
    assert Reasoning(model=".", engine={"name": "torch", "num_draft_tokens": 0}).model == "."


@pytest.mark.parametrize(
    ("train", "distill", "message"),
    [
        ({"sharded": True}, {}, r"\[train\] sharded is for \[pretrain\] and \[finetune\], and the recipe has neither"),
        ({}, {"distill.device": "cpu"}, r'\[distill\]: key "device" would do nothing, since \[train\] gpus says'),
        ({}, {"distill.answers": {"name": "on_policy"}}, 'answers "on_policy" are written by the draft as it learns'),
    ],
)
def test_what_processes_of_a_cluster_would_not_read_is_refused(
    train: dict[str, Any], distill: dict[str, Any], message: str
) -> None:
    require_refused({**distill, "train": {"workers": 2, **train}}, message)
    parsed(distill)
