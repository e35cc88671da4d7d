"""Recipes: all that ship are parsed, and a slip is named with its table and the nearest key."""

import tomllib
from typing import Any

import pytest

from models.recipe import changed_tables, load_recipe, shipped_recipes, toml
from tests.models.changed import REFERENCE, TORCH, UNTRAINED, parsed, require_kept, require_refused, tables_with


@pytest.mark.parametrize("name", shipped_recipes())
def test_a_shipped_recipe_is_parsed_and_survives_json(name: str) -> None:
    assert require_kept(load_recipe(name)).name == name


def test_a_refresh_trains_with_the_keys_that_differ() -> None:
    recipe = parsed({"distill.num_threads": 0, "distill.learning_rate": 0.5, "refresh.distill": {"num_threads": 1}})
    assert (recipe.distill.num_threads, recipe.refresh_distill().num_threads) == (0, 1)
    assert recipe.refresh_distill().learning_rate == 0.5


TEACHERS = {"distill.teachers": [{"model": {"name": "random", "seed": 1}, "weight": 0.5}]}


def test_teachers_are_tables_of_targets_that_a_refresh_has_too_unless_it_says_so() -> None:
    recipe = require_kept(parsed(TEACHERS))
    [teacher] = recipe.distill.teachers
    assert (teacher.model.name, teacher.model.seed, teacher.weight) == ("random", 1, 0.5)
    assert recipe.refresh_distill().teachers == recipe.distill.teachers
    assert parsed({**TEACHERS, "refresh.distill": {"teachers": []}}).refresh_distill().teachers == ()


UNREAD = r'loss "cross_entropy" does not read what teachers say'


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"distill.teachers": [{"model": {"name": "randm"}}]}, r'no method "randm" in targets \(did you mean "rand'),
        ({"distill.teachers": [{"model": {"name": "random"}, "weight": -1}]}, r'"teachers.0.weight": .*got -1'),
        ({**TEACHERS, "distill.loss": {"name": "cross_entropy"}}, UNREAD),
        ({**REFERENCE, **TEACHERS, "draft": {"name": "medusa"}, "refresh": None}, UNREAD),
        ({**UNTRAINED, **TEACHERS}, r"teachers are for drafts that are trained, and this one has no weights"),
    ],
)
def test_teachers_that_a_draft_can_not_learn_from_are_refused(changes: dict[str, Any], message: str) -> None:
    require_refused(changes, message)


def test_an_unknown_recipe_is_answered_with_the_nearest_one_and_a_broken_file_is_named(tmp_path) -> None:
    with pytest.raises(ValueError, match=r'no recipe "tinny" \(did you mean "tiny"\?\)'):
        load_recipe("tinny")
    (tmp_path / "broken.toml").write_text("[target\n")
    with pytest.raises(ValueError, match=r"broken.toml can't be read as TOML"):
        load_recipe(str(tmp_path / "broken.toml"))


def test_the_reference_engine_runs_drafts_that_vllm_can_not_and_its_methods_survive_json() -> None:
    draft = {**REFERENCE, "draft": {"name": "jacobi"}, "refresh": None, "distill": None}
    assert parsed(draft).draft.name == "jacobi"
    assert parsed(draft) == parsed({**draft, "distill": {}})  # of what is not trained
    recipe = require_kept(parsed({**REFERENCE, "engine.verify": {"name": "rejection"}}))
    assert recipe.engine.rules.sampling.name == "rejection"


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("refresh.min_rowz", 1, r'r: unknown key "refresh.min_rowz" \(did you mean "min_rows"\?\)'),
        ("target.name", "rand", r'r: key "target": no method "rand" in targets'),
        ("draft.name", "eagel", r'no method "eagel" in drafts \(did you mean "eagle"\?\)'),
        ("draft", {"name": "jacobi"}, r'engine "vllm" can\'t draft with family jacobi; engine "torch" can'),
        ("engine.num_draft_tokens", 0, r"engine.num_draft_tokens is 0"),
        ("distill.num_unroll", 2, r'key "distill": distill: unknown key "num_unroll"'),
        ("engine.num_drafts", 2, r'unknown key "num_drafts"'),
        ("distill.loss", {"name": "kl"}, r'no method "kl" in losses'),
        ("distill.learning_rate", -1, r'key "distill": distill: key "learning_rate": .*got -1'),
        ("engine.max_num_seqs", 0, r'key "engine": engines.vllm: key "max_num_seqs"'),
        ("gate.floor", 2, r'key "gate.floor"'),
        ("refresh.distill", {"num_epoch": 1}, r'unknown key "num_epoch"'),
        ("refresh.max_rows", 20, r"min_rows 60 is above max_rows 20"),
        ("refresh.regenerate.max_tokens", 256, r"regenerate.max_tokens is 256, .* engine.max_model_len 256"),
        ("refresh.regenerate.temperature", 3, r"temperature"),
        ("engine.lookup.num_token", 9, r'unknown key "lookup.num_token" \(did you mean "num_tokens"\?\)'),
        ("engine.lookup", 9, r'key "lookup": wanted a table, got 9'),
        ("demo.new_domain", "cod", r'demo names domain "cod" \(did you mean "code"\?\)'),
        ("serve.limits.max_queued", 7, r'r: unknown key "serve.limits.max_queued" \(did you mean "max_queued_r'),
        ("traffic.code.source.cuont", 3, r'"traffic.code.source": .*unknown key "cuont" \(did you mean "count"'),
        ("traffic.chat.num_train", 0, r"no domain has num_train above 0"),
        ("serve", 8000, r'r: key "serve": wanted a table, got 8000'),
        ("serv", {}, r'unknown key "serv" \(did you mean "serve"\?\)'),
    ],
)
def test_a_slip_is_named(path: str, value: object, message: str) -> None:
    require_refused({path: value}, message)


@pytest.mark.parametrize(
    ("key", "name", "message"),
    [
        ("verify", "rejektion", r'key "verify": .*no method "rejektion" in verify \(did you mean "rejection"\?\)'),
        ("verify_greedy", "gredy", r'key "verify_greedy": .*no method "gredy" in verify \(did you mean "greedy"\?\)'),
        ("verify", "greedy", r"greedy is for greedy decoding only"),
        ("verify_greedy", "rejection", r"rejection wants probabilities, which temperature 0 has none of"),
        ("lengths", "fixd", r'key "lengths": .*no method "fixd" in lengths \(did you mean "fixed"\?\)'),
    ],
)
def test_a_slip_in_a_method_of_the_reference_engine_is_named(key: str, name: str, message: str) -> None:
    require_refused({"engine": {**TORCH, key: {"name": name}}}, message)


def test_prompts_are_answered_again_for_drafts_that_learn_and_only_where_a_recipe_says_so() -> None:
    assert parsed({}).refresh.regenerate is None
    assert parsed({"refresh.regenerate": {}}).refresh.regenerate.temperature is None
    require_refused({**UNTRAINED, "refresh.regenerate": {}}, "refresh.regenerate is for drafts that are trained")


def test_a_change_replaces_a_value_and_leaves_the_rest_of_its_table() -> None:
    changes = ["distill.num_epochs=3", 'refresh.distill={"num_epochs" = 5}', "seed = 7"]
    wanted = {"distill.num_epochs": 3, "refresh.distill": {"num_epochs": 5}, "seed": 7, "name": "tiny"}
    assert changed_tables("tiny", changes) == tables_with(wanted)
    with pytest.raises(ValueError, match=r"tiny\.toml with --set draft\.name=medusa: .*vocab_size = 0 in \[draft\]"):
        changed_tables("tiny", ["draft.name=medusa"])


@pytest.mark.parametrize("change", ["distill", "=3", "a b=3", "distill.=3", ""])
def test_a_change_without_key_or_value_is_refused(change: str) -> None:
    with pytest.raises(ValueError, match=r"^--set is .*, wanted KEY=VALUE such as"):
        changed_tables("tiny", [change])


def test_tables_are_written_as_toml_reads_them() -> None:
    exceptions = {"*.mlp.down_proj": {"name": "int8_dynamic"}, "model.layers.0.*": "float"}
    tables = {
        "name": "mine, ½ 🙂",
        "prune": {"method": {"name": "wanda"}, "pattern": "2:4", "num_documents": 8},
        "quantize": {"method": {"name": "int8_static", "percentile": 99.5}, "exceptions": exceptions},
        "pretrain": {"regimes": [{"name": "dorefa"}, {"name": "packing"}], "checked": True},
    }
    assert tomllib.loads(toml(tables)) == tables
