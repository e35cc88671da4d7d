"""Recipes: all that ship are parsed, and a slip is named with its table and the nearest key."""

import tomllib

import pytest

from models.recipe import Recipe, changed_tables, load_recipe, parse_recipe, shipped_recipes, toml


@pytest.mark.parametrize("name", shipped_recipes())
def test_a_shipped_recipe_is_parsed_and_survives_json(name):
    recipe = load_recipe(name)
    assert recipe.name == name
    assert Recipe.model_validate_json(recipe.model_dump_json()) == recipe


def test_a_refresh_trains_with_the_keys_that_differ(tables):
    tables["distill"] |= {"num_threads": 0, "learning_rate": 0.5}
    tables["refresh"]["distill"] = {"num_threads": 1}
    recipe = parse_recipe(tables, "r")
    assert (recipe.distill.num_threads, recipe.refresh_distill().num_threads) == (0, 1)
    assert recipe.refresh_distill().learning_rate == 0.5


def test_teachers_are_tables_of_targets_that_a_refresh_has_too_unless_it_says_so(tables):
    tables["distill"]["teachers"] = [{"model": {"name": "random", "seed": 1}, "weight": 0.5}]
    recipe = parse_recipe(tables, "r")
    [teacher] = recipe.distill.teachers
    assert (teacher.model.name, teacher.model.seed, teacher.weight) == ("random", 1, 0.5)
    assert recipe.refresh_distill().teachers == recipe.distill.teachers
    assert Recipe.model_validate_json(recipe.model_dump_json()) == recipe
    tables["refresh"]["distill"] = {"teachers": []}
    assert parse_recipe(tables, "r").refresh_distill().teachers == ()


@pytest.mark.parametrize(
    ("draft", "changes", "message"),
    [
        ("eagle3", {"teachers": [{"model": {"name": "randm"}}]}, r'no method "randm" in targets \(did you mean "rand'),
        ("eagle3", {"teachers": [{"model": {"name": "random"}, "weight": -1}]}, r'key "teachers.0.weight": .*got -1'),
        ("eagle3", {"loss": {"name": "cross_entropy"}}, r'loss "cross_entropy" does not read what teachers say'),
        ("medusa", {}, r'loss "cross_entropy" does not read what teachers say'),
        ("ngram", {}, r"teachers are for drafts that are trained, and this one has no weights"),
    ],
)
def test_teachers_that_a_draft_can_not_learn_from_are_refused(tables, draft, changes, message):
    del tables["serve"], tables["demo"]
    tables["engine"], tables["draft"] = {"name": "torch"}, {"name": draft}
    tables["distill"] = {"teachers": [{"model": {"name": "random"}}], **changes}
    with pytest.raises(ValueError, match=message):
        parse_recipe(tables, "r")


def test_a_recipe_sets_probation_drain_and_request_limits(tables):
    tables["serve"] = {"drain_s": 3, "probation": {"timeout_s": 12}, "limits": {"max_queued_requests": 7}}
    serve = parse_recipe(tables, "r").serve
    assert (serve.drain_s, serve.probation.timeout_s, serve.limits.max_queued_requests) == (3, 12, 7)


def test_an_unknown_recipe_is_answered_with_the_nearest_one_and_a_broken_file_is_named(tmp_path):
    with pytest.raises(ValueError, match=r'no recipe "tinny" \(did you mean "tiny"\?\)'):
        load_recipe("tinny")
    (tmp_path / "broken.toml").write_text("[target\n")
    with pytest.raises(ValueError, match=r"broken.toml can't be read as TOML"):
        load_recipe(str(tmp_path / "broken.toml"))


def test_the_reference_engine_runs_drafts_that_vllm_can_not(tables):
    tables["draft"] = {"name": "jacobi"}
    for name in ("serve", "demo", "distill", "refresh"):
        del tables[name]
    tables |= {"engine": {"name": "torch"}}
    assert parse_recipe(tables, "r").draft.name == "jacobi"
    assert parse_recipe(tables, "r") == parse_recipe({**tables, "distill": {}}, "r")  # of what is not trained


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("refresh.min_rowz", 1, r'r: unknown key "refresh.min_rowz" \(did you mean "min_rows"\?\)'),
        ("target.name", "rand", r'r: key "target": no method "rand" in targets'),
        ("draft.name", "eagel", r'no method "eagel" in drafts \(did you mean "eagle"\?\)'),
        ("draft", {"name": "jacobi"}, r'engine "vllm" can\'t draft with family jacobi; engine "torch" can'),
        ("engine.num_draft_tokens", 0, r"engine.num_draft_tokens is 0; a draft is trained, gated and served at 1"),
        ("distill.num_unroll", 2, r'key "distill": distill: unknown key "num_unroll"'),
        ("engine.num_drafts", 2, r'unknown key "num_drafts"'),
        ("distill.learning_rat", 2, r'unknown key "learning_rat" \(did you mean "learning_rate"\?\)'),
        ("distill.loss", {"name": "kl"}, r'no method "kl" in losses'),
        ("distill.learning_rate", -1, r'key "distill": distill: key "learning_rate": Input should be greater than 0'),
        ("engine.max_num_seqs", 0, r'key "engine": engines.vllm: key "max_num_seqs"'),
        ("gate.floor", 2, r'key "gate.floor"'),
        ("refresh.distill", {"num_epoch": 1}, r'unknown key "num_epoch"'),
        ("refresh.max_rows", 20, r"min_rows 60 is above max_rows 20"),
        ("refresh.regenerate.max_tokens", 256, r"regenerate.max_tokens is 256, .* engine.max_model_len 256"),
        ("refresh.regenerate.max_tokens", 3, r"max_tokens"),
        ("refresh.regenerate.temperature", -1, r"temperature"),
        ("refresh.regenerate.temperature", 3, r"temperature"),
        ("refresh.regenerate.per_domain", 0, r"per_domain"),
        ("refresh.regenerate.max_minutes", 0, r"max_minutes"),
        ("refresh.regenerate.max_token", 9, r"max_token"),
        ("keep.num_draft", 9, r'r: unknown key "keep.num_draft" \(did you mean "num_drafts"\?\)'),
        ("engine.lookup.num_token", 9, r'unknown key "lookup.num_token" \(did you mean "num_tokens"\?\)'),
        ("engine.lookup", 9, r'key "lookup": wanted a table, got 9'),
        ("demo.new_domain", "cod", r'demo names domain "cod" \(did you mean "code"\?\)'),
        ("serve.limits.max_queued", 7, r'r: unknown key "serve.limits.max_queued" \(did you mean "max_queued_r'),
        (
            "traffic.code.source.cuont",
            3,
            r'r: key "traffic.code.source": sources.synthetic: unknown key "cuont" \(did you mean "count"',
        ),
        ("traffic.chat.num_train", 0, r"no domain has num_train above 0"),
        ("serve", 8000, r'r: key "serve": wanted a table, got 8000'),
        ("serv", {}, r'unknown key "serv" \(did you mean "serve"\?\)'),
    ],
)
def test_a_slip_is_named(tables, path, value, message):
    *parents, key = path.split(".")
    table = tables
    for parent in parents:
        table = table.setdefault(parent, {})
    table[key] = value
    with pytest.raises(ValueError, match=message):
        parse_recipe(tables, "r")


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
def test_a_slip_in_a_method_of_the_reference_engine_is_named(tables, key, name, message):
    tables["engine"] = {"name": "torch", key: {"name": name}}
    with pytest.raises(ValueError, match=message):
        parse_recipe(tables, "r")


def test_the_reference_engines_methods_survive_json(tables):
    del tables["serve"], tables["demo"]
    tables["engine"] = {"name": "torch", "verify": {"name": "rejection"}}
    recipe = parse_recipe(tables, "r")
    assert recipe.engine.rules.sampling.name == "rejection"
    assert Recipe.model_validate_json(recipe.model_dump_json()) == recipe


def test_prompts_are_answered_again_for_drafts_that_learn_and_only_where_a_recipe_says_so(tables):
    assert parse_recipe(tables, "r").refresh.regenerate is None
    tables["refresh"]["regenerate"] = {}
    assert parse_recipe(tables, "r").refresh.regenerate.temperature is None
    tables["draft"] = {"name": "ngram"}
    with pytest.raises(
        ValueError, match="refresh.regenerate is for drafts that are trained, and this one has no weights"
    ):
        parse_recipe(tables, "r")


def test_a_change_replaces_a_value_and_leaves_the_rest_of_its_table():
    changes = ["distill.num_epochs=3", "draft.name=medusa", 'refresh.distill={"num_epochs" = 5}', "seed = 7"]
    tables, before = changed_tables("tiny", [*changes[:1], *changes[2:]]), changed_tables("tiny", [])
    assert (tables["distill"], tables["refresh"]["distill"]) == (
        {"num_epochs": 3, "batch_tokens": 1024},
        {"num_epochs": 5},
    )
    assert (tables["name"], tables["seed"], tables["traffic"]) == ("tiny", 7, before["traffic"])
    with pytest.raises(ValueError, match=r"tiny\.toml with --set draft\.name=medusa: .*vocab_size = 0 in \[draft\]"):
        changed_tables("tiny", changes[1:2])


@pytest.mark.parametrize("change", ["distill", "=3", "a b=3", "distill.=3", ""])
def test_a_change_without_key_or_value_is_refused(change):
    with pytest.raises(ValueError, match=r"^--set is .*, wanted KEY=VALUE such as"):
        changed_tables("tiny", [change])


def test_tables_are_written_as_toml_reads_them():
    tables = {
        "name": "mine, ½ 🙂",
        "prune": {"method": {"name": "wanda"}, "pattern": "2:4", "num_documents": 8},
        "quantize": {
            "method": {"name": "int8_static", "percentile": 99.5},
            "exceptions": {"*.mlp.down_proj": {"name": "int8_dynamic"}, "model.layers.0.*": "float"},
        },
        "pretrain": {"regimes": [{"name": "dorefa"}, {"name": "packing"}], "checked": True},
    }
    assert tomllib.loads(toml(tables)) == tables
