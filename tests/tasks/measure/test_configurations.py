from pathlib import Path

import pytest
import torch

from infra.artifacts import Artifact
from models import catalog
from models.core.drafting.draft_families import family_named, family_of, is_trained, name_of
from models.core.evaluation.golden import save_golden
from models.recipe import load_recipe, toml
from models.sources import Message
from tasks.measure.configurations import (
    SERVED,
    Configuration,
    every_family,
    is_made,
    make_drafts,
    read_configurations,
)
from tasks.measure.run import Bar
from tasks.measure.specbench import ALL, PLAIN, Question, _answer, make_report
from tests.models.drafts.tiny import params_of
from tests.tasks.made import said_by, samples_files
from tests.tasks.measure.benches import open_target


def test_without_a_file_there_is_the_served_draft_and_each_family_that_needs_nothing() -> None:
    found = read_configurations(None, served_k=3)
    assert found["served draft"] == Configuration(draft=SERVED, engine={"num_draft_tokens": 3})
    untrained = {name for name in catalog.names("drafts") if not is_trained(family_named(name))}
    assert set(found) == {"served draft", "served draft, look-up", *untrained} - {"rest"}


def test_a_table_says_the_draft_and_how_the_engine_runs_it(tiny_target: Path, tiny_draft: Path, tmp_path: Path) -> None:
    file = tmp_path / "ways.toml"
    file.write_text(
        f'[a]\ndraft = {{ name = "suffix", shortest = 3 }}\nnum_draft_tokens = 9\n[b]\ndraft = "{tiny_draft}"\n'
        '[c]\ndraft = "served"\nlengths = { name = "confidence" }\n'
    )
    found = read_configurations(file, 3)
    target = open_target(tiny_target, tiny_draft, max_model_len=99)
    engines = {name: target.engine(way) for name, way in found.items()}
    assert [engines[name].draft for name in "abc"] == [None, tiny_draft, tiny_draft]
    assert engines["a"].params.num_draft_tokens == 9
    assert engines["a"].loaded.params.shortest == 3
    assert {engine.params.max_model_len for engine in engines.values()} == {99}
    assert engines["c"].params.lengths.name == "confidence"
    assert not target.engine(None).speculating


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no table"),
        ("[a", "can't be read as TOML"),
        ("a = 1", r"ways.toml: \[a\]: wanted a table, got 1"),
        ("[a]\nnum_draft_tokens = 3", r'\[a\]: key "draft" is missing'),
        ('[a]\ndraft = "served"\ndtype = "float32"', r'\[a\]: key "dtype" is the recipe\'s'),
        ('[a]\ndraft = "served"\nnum_drafts = 3', r'\[a\]: .*unknown key "num_drafts"'),
        ('[a]\ndraft = { name = "sufix" }', r'\[a\]: no method "sufix" in drafts \(did you mean "suffix"\?\)'),
        ('[a]\ndraft = { name = "lm" }', r"\[a\]: a draft of family lm has to be trained"),
        ("[a]\ndraft = 5", r"\[a\]: "),
        ('[a]\ndraft = "served"\ndistill = { num_epochs = 1 }', r'\[a\]: key "distill" is for new drafts'),
    ],
)
def test_a_configuration_that_is_wrong_is_named(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "ways.toml").write_text(text)
    with pytest.raises(ValueError, match=message):
        read_configurations(tmp_path / "ways.toml", 3)


TINY = load_recipe("tiny")
QUESTIONS = [Question(id="1", domain="qa", messages=(Message(role="user", content="a b c a b c"),))]


@pytest.fixture
def answered(home: Path, target: Artifact, tmp_path: Path) -> tuple[Artifact, Artifact]:
    """The tiny target and its answers, in a home of their own."""
    return target, samples_files(tmp_path / "samples", said_by(target, 6))


def tiny_ways(file: Path) -> dict[str, Configuration]:
    """Read a file that names every family in a shape that fits the tiny target."""
    tables = {}
    for name in catalog.names("drafts"):
        shape = params_of(family_named(name)).model_dump(mode="json", exclude_none=True)
        few = {"num_trials": 2} if name == "self_skip" else {}
        tables[name] = {"draft": shape | few, "num_draft_tokens": 2}
    file.write_text(toml(tables))
    return read_configurations(file, 2, makes=True)


@pytest.mark.slow
def test_every_family_is_in_one_table_greedily_and_at_temperature_1(
    answered: tuple[Artifact, Artifact], tmp_path: Path, bar: Bar
) -> None:
    asked, folder = tiny_ways(tmp_path / "ways.toml"), tmp_path / "home" / "artifacts" / "draft"
    assert [*asked] == catalog.names("drafts")
    ways = make_drafts(TINY, *answered, asked, 0.001)
    for name, way in ways.items():
        assert isinstance(way.draft, str) == is_made(asked[name])
        assert not isinstance(way.draft, str) or name_of(family_of(Path(way.draft))) == name
    made = sorted(folder.iterdir())
    assert (make_drafts(TINY, *answered, asked, 0.001), sorted(folder.iterdir())) == (ways, made)

    directory = answered[0].path
    target = open_target(directory, directory, max_model_len=64)
    rows = {at: _answer(target, ways, QUESTIONS, 12, bar, at) for at in (0.0, 1.0)}
    save_golden(tmp_path, [], 1e-3)
    report = make_report(rows, ways, tmp_path, tmp_path, seed=0)
    assert report.failures == []
    both = next(grid for grid in report.grids if grid.title == "over all tasks, by temperature")
    assert [row[0] for row in both.rows] == [PLAIN, *catalog.names("drafts")]
    assert all("–" not in row for row in both.rows)
    assert all(set(of["tasks"][ALL]) == {PLAIN, *ways} for of in report.figures["temperatures"].values())


def test_without_a_file_there_is_the_served_draft_and_every_family_with_its_vocabulary() -> None:
    ways = every_family(TINY)
    assert [*ways] == ["served draft", "served draft, look-up", *catalog.names("drafts")]
    assert ways["eagle3"].draft == TINY.draft
    assert ways["eagle"].draft.vocab_size == TINY.draft.vocab_size
    tokens = {name: way.engine["num_draft_tokens"] for name, way in ways.items()}
    assert (tokens["eagle3"], tokens["early_exit"], tokens["rag_draft"], tokens["suffix"]) == (2, 2, 2, 8)


@pytest.mark.slow
def test_what_a_table_says_of_training_goes_before_the_recipe(
    answered: tuple[Artifact, Artifact], tmp_path: Path
) -> None:
    file = tmp_path / "ways.toml"
    table = '[lm{0}]\ndraft = {{ name = "lm", num_layers = 1 }}\ndistill = {{ learning_rate = {1} }}\n'
    file.write_text(table.format("", 1e-3) + table.format("-slowly", 1e-12))
    ways = make_drafts(TINY, *answered, read_configurations(file, 2, makes=True), 1.0)
    new = family_named("lm").create(catalog.parse("drafts", {"name": "lm", "num_layers": 1}), answered[0].path, None)

    def moved(way: Configuration) -> float:
        draft = family_named("lm").load(Path(str(way.draft)), answered[0].path)
        parts = zip(draft.parameters(), new.parameters(), strict=True)
        return max(float((one - other.to(torch.bfloat16)).detach().abs().max()) for one, other in parts)

    assert moved(ways["lm"]) > 1e-3
    assert moved(ways["lm-slowly"]) < 1e-3


def test_a_draft_that_does_not_fit_the_target_is_named(answered: tuple[Artifact, Artifact], tmp_path: Path) -> None:
    (tmp_path / "ways.toml").write_text('[deep]\ndraft = { name = "lm", num_layers = 9 }\n')
    ways = read_configurations(tmp_path / "ways.toml", 2, makes=True)
    with pytest.raises(ValueError, match="deep: num_layers must be 1 to 1"):
        make_drafts(TINY, *answered, ways, 1.0)
