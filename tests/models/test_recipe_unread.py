"""What a recipe says and nothing would read is refused when it is read, by the table and key."""

import tomllib
from typing import Any

import pytest

from models import catalog
from models.recipe import parse_recipe, shipped_recipes
from models.serving import Capture, Reasoning, Structured

TORCH = {"name": "torch", "num_draft_tokens": 2}
JOINED = {"lookup": {"num_tokens": 4}, "lengths": {"name": "goodput"}}
TEXT = {"source": {"name": "synthetic"}, "num_train": 20, "num_held_out": 4}
ALONE = ("serve", "demo", "text")  # that a recipe can do without, and of which the first two take an endpoint


def recipe(drop: tuple[str, ...] = (), **tables: Any) -> dict[str, Any]:
    """Return the tiny recipe's tables, with others in their place."""
    tiny = tomllib.loads(shipped_recipes()["tiny"].read_text())
    return {name: table for name, table in tiny.items() if name not in drop} | {"name": "r"} | tables


@pytest.mark.parametrize(
    "served", [{"serve": {"poll_s": 3}}, {"demo": {"stock": False}}, {"serve": {"tool_parser": "hermes"}}]
)
def test_an_engine_without_an_endpoint_goes_with_no_table_of_one(served: dict[str, Any]) -> None:
    tiny = recipe()
    own = {name: {**tiny[name], **table} for name, table in served.items()}
    with pytest.raises(ValueError, match='engine "torch" has no endpoint: leave out'):
        parse_recipe(recipe(ALONE, engine=TORCH, **own), "r")
    alone = parse_recipe(recipe(ALONE, engine=TORCH), "r")
    with pytest.raises(ValueError, match='engine "torch" has no endpoint'):
        alone.require_served()
    parse_recipe(recipe(), "r").require_served()


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
        ("eagle3", {"lengths": {"name": "specdec_pp", "rejection_weight": 2}}, 'key "rejection_weight" would do noth'),
        ("eagle3", {"verify_greedy": {"name": "judge", "bad_weight": 2}}, 'key "bad_weight" would do nothing'),
        ("eagle3", {"lengths": {"name": "goodput", "margin": 0.5}}, "goodput: key .margin. would do nothing"),
    ],
)
def test_ways_of_drafting_that_a_family_can_not_be_drafted_with_are_refused_before_the_engine_starts(
    draft: str, ways: dict[str, Any], message: str
) -> None:
    tables = {"engine": {**TORCH, **ways}, "draft": {"name": draft}, "distill": {}}
    with pytest.raises(ValueError, match=message):
        parse_recipe(recipe((*ALONE, "refresh"), **tables), "r")


def test_a_nested_draft_and_policies_that_read_their_keys_are_taken() -> None:
    drafting = {"nested_confidence": 0.5, "lengths": {"name": "confidence", "threshold": 0.3}}
    tables = {"engine": {**TORCH, **drafting}, "draft": {"name": "lm", "nested": [1]}}
    assert parse_recipe(recipe(ALONE, **tables), "r").draft.nested == (1,)
    joined = {"lookup": {"num_tokens": 4}, "lengths": {"name": "goodput", "margin": 0.5}}
    assert parse_recipe(recipe(ALONE, engine={**TORCH, **joined}), "r").engine.lengths.margin == 0.5


@pytest.mark.parametrize(
    ("draft", "engine", "message"),
    [
        ({"name": "lm", "nested": [1]}, {}, r"vLLM drafts with all layers; got nested \[1\]: set nested = \[\]"),
        ({"name": "ngram"}, {"lookup": {"shortest": 2}}, r'\[engine\]: key "lookup" would do nothing, since vLLM dr'),
        ({"name": "ngram"}, {"lengths": {"name": "fixed"}}, 'key "lengths" would do nothing'),
        ({"name": "ngram"}, {"draft_sample_method": "greedy"}, 'key "draft_sample_method" would do nothing'),
    ],
)
def test_what_vllm_would_not_do_with_a_draft_is_refused(
    draft: dict[str, Any], engine: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        parse_recipe(recipe(("refresh",), draft=draft, distill={}, engine={"name": "vllm", **engine}), "r")


def test_hidden_states_are_captured_only_where_a_draft_reads_them() -> None:
    serve = {"capture": {"share": 0.5}}
    assert parse_recipe(recipe(serve=serve), "r").serve.capture.is_on
    with pytest.raises(ValueError, match=r"\[serve\] capture: a draft of family lm reads no layers of the target"):
        parse_recipe(recipe(serve=serve, draft={"name": "lm"}), "r")


@pytest.mark.parametrize(
    ("engine", "distill", "message"),
    [
        ({"name": "vllm"}, {"lengths": {"name": "specdec_pp"}}, 'fits a head that engine "vllm" would not read'),
        (TORCH, {"lengths": {"name": "specdec_pp"}}, '"torch" would not read: it decodes by chain, fixed, greedy'),
        (TORCH, {"verify": {"name": "judge", "marks": "m.jsonl"}}, "verify = .judge. fits a head that"),
    ],
)
def test_a_head_that_the_engine_would_not_read_is_not_fit(
    engine: dict[str, Any], distill: dict[str, Any], message: str
) -> None:
    drop = ALONE if engine is TORCH else ()
    with pytest.raises(ValueError, match=message):
        parse_recipe(recipe(drop, engine=engine, distill=distill), "r")
    own = {"refresh": {"min_rows": 1, "distill": distill}}
    with pytest.raises(ValueError, match=message):
        parse_recipe(recipe(drop, engine=engine, **own), "r")


def test_a_head_that_the_engine_reads_is_fit() -> None:
    engine = {**TORCH, "lengths": {"name": "specdec_pp", "threshold": 0.2}, "verify_greedy": {"name": "judge"}}
    distill = {"lengths": {"name": "specdec_pp", "num_layers": 1}, "verify": {"name": "judge", "marks": "m.jsonl"}}
    assert len(parse_recipe(recipe(ALONE, engine=engine, distill=distill), "r").distill.heads) == 2


@pytest.mark.parametrize(
    ("draft", "distill", "refresh", "message"),
    [
        ("ngram", {"num_epochs": 2}, {}, r'\[distill\]: key "num_epochs" would do nothing, since .* no weights'),
        ("ngram", {}, {"batch_tokens": 99}, r'\[refresh\] distill: key "batch_tokens" would do nothing'),
        ("lm", {"step_decay": 0.5}, {}, r'key "step_decay" would do nothing, since .* lm is unrolled once'),
        ("lm", {}, {"follow": "all"}, r'\[refresh\] distill: key "follow" would do nothing'),
        ("eagle3", {"patience": 3}, {}, r'\[distill\]: key "patience" would do nothing, since validation is 0'),
    ],
)
def test_keys_of_training_that_a_draft_is_not_trained_by_are_refused(
    draft: str, distill: dict[str, Any], refresh: dict[str, Any], message: str
) -> None:
    tables = {"draft": {"name": draft}, "distill": distill, "refresh": {"distill": refresh}}
    with pytest.raises(ValueError, match=message):
        parse_recipe(recipe(**tables), "r")


def test_patience_of_a_build_or_a_refresh_alone_is_taken() -> None:
    validated = {"validation": 0.2, "patience": 3}
    taken = parse_recipe(recipe(distill=validated, refresh={"distill": {"validation": 0.0}}), "r")
    assert (taken.distill.patience, taken.refresh_distill().validation) == (3, 0.0)


def stage(name: str, *, key: str = "", value: object = 2, **settings: Any) -> dict[str, Any]:
    return {"method": {"name": name, **settings}} | ({key: value} if key else {})


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
        (
            {"shrink": stage("depth", num_layers=1, key="learning_rate")},
            r'\[shrink\]: key "learning_rate" would do nothing, since depth only calibrates',
        ),
        (
            {"quantize": stage("gptq", group_size=32, key="num_epochs")},
            r'\[quantize\]: key "num_epochs" would do nothing, since gptq only calibrates',
        ),
        (
            {"quantize": stage("int8_dynamic", key="num_documents")},
            r'\[quantize\]: key "num_documents" would do nothing, since int8_dynamic reads no text',
        ),
        (
            {"quantize": stage("qat", group_size=32, key="num_documents")},
            r'\[quantize\]: key "num_documents" would do nothing, since qat only trains',
        ),
    ],
)
def test_keys_of_stages_that_neither_train_nor_calibrate_are_refused(tables: dict[str, Any], message: str) -> None:
    for table in tables.values():
        if table["method"]["name"] in catalog.names("prune"):
            table["pattern"] = 0.5
    with pytest.raises(ValueError, match=message):
        parse_recipe(recipe(text={"code": TEXT}, **tables), "r")


def test_text_is_selected_for_a_stage_that_reads_it() -> None:
    select = {"method": {"name": "kcenter"}, "num_documents": 9}
    for stage in (
        {"pretrain": {}},
        {"prune": {"method": {"name": "wanda"}, "pattern": 0.5, "num_documents": 4}},
        {"quantize": {"method": {"name": "qat", "group_size": 32}, "num_epochs": 2}},
        {"quantize": {"method": {"name": "int8_dynamic"}, "exceptions": {"*.down_proj": {"name": "int8_static"}}}},
    ):
        assert parse_recipe(recipe(text={"code": TEXT}, select=select, **stage), "r").select is not None


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


def test_settings_of_what_is_off_are_refused(tmp_path: Any) -> None:
    with pytest.raises(ValueError, match='structured: key "max_depth" would do nothing, since enabled is false'):
        Structured(enabled=False, max_depth=9)
    with pytest.raises(ValueError, match='capture: key "keep_days" would do nothing, since share is 0'):
        Capture(keep_days=1)
    with pytest.raises(ValueError, match='reasoning: key "engine" would do nothing, since there is no model'):
        Reasoning(engine={"name": "vllm"})
    with pytest.raises(ValueError, match='engine: key "trees" would do nothing, since the small model has no draft'):
        Reasoning(model=str(tmp_path), engine={"name": "torch", "trees": {"name": "dynamic"}})
    assert Reasoning(model=str(tmp_path), engine={"name": "torch", "num_draft_tokens": 0}).model
    assert Structured(enabled=True, max_depth=9).max_depth == 9 and Capture(share=1, keep_days=1).keep_days == 1


@pytest.mark.parametrize(
    ("train", "distill", "message"),
    [
        ({"sharded": True}, {}, r"\[train\] sharded is for \[pretrain\] and \[finetune\], and the recipe has neither"),
        ({}, {"device": "cpu"}, r'\[distill\]: key "device" would do nothing, since \[train\] gpus says what trains'),
        ({}, {"answers": {"name": "on_policy"}}, 'answers "on_policy" are written by the draft as it learns'),
    ],
)
def test_what_processes_of_a_cluster_would_not_read_is_refused(
    train: dict[str, Any], distill: dict[str, Any], message: str
) -> None:
    tables = recipe(distill={**recipe()["distill"], **distill})
    with pytest.raises(ValueError, match=message):
        parse_recipe({**tables, "train": {"workers": 2, **train}}, "r")
    if not train:
        parse_recipe(tables, "r")
