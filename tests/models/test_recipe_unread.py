"""What a recipe says and nothing would read is refused when it is read, by the table and key."""

from typing import Any

import pytest

from models import catalog
from models.serving import Capture, Reasoning, Structured
from tests.models.changed import REFERENCE, TEXT, TORCH, UNTRAINED, parsed, require_refused


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
