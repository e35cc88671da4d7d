from pathlib import Path

import pytest
import torch

from models import catalog
from models.drafting.draft_families import family_named
from models.layers.decoder import Decoder
from tasks.measure.configurations import SERVED, Configuration, Target, read_configurations


def test_without_a_file_there_is_the_served_draft_and_each_family_that_needs_nothing() -> None:
    found = read_configurations(None, served_k=3)
    assert found["served draft"] == Configuration(draft=SERVED, engine={"num_draft_tokens": 3})
    untrained = {name for name in catalog.names("drafts") if not family_named(name).TRAINED}
    assert set(found) == {"served draft", "served draft, look-up", *untrained} - {"rest"}


def test_a_table_says_the_draft_and_how_the_engine_runs_it(tiny_target: Path, tiny_draft: Path, tmp_path: Path) -> None:
    file = tmp_path / "ways.toml"
    file.write_text(
        f'[a]\ndraft = {{ name = "suffix", shortest = 3 }}\nnum_draft_tokens = 9\n[b]\ndraft = "{tiny_draft}"\n'
        '[c]\ndraft = "served"\nlengths = { name = "confidence" }\n'
    )
    found = read_configurations(file, 3)
    shared = {"dtype": "float32", "max_model_len": 99}
    target = Target(tiny_target, Decoder.load(tiny_target, torch.float32), tiny_draft, shared)
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
