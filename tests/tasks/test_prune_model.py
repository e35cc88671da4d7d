"""The stage that prunes: what it calibrates on is enough, or somebody is told."""

import logging
import shutil
import tomllib
from pathlib import Path

import pytest

from models.recipe import parse_recipe, shipped_recipes
from tasks.prepare_target import prepare_target
from tasks.prepare_text import prepare_text
from tasks.prune_model import prune_model

pytestmark = pytest.mark.slow


def test_too_short_a_calibration_is_told_with_what_would_do(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copy(store, tmp_path)
    monkeypatch.setenv("REDRAFT_HOME", str(tmp_path))
    recipe = parse_recipe({"name": "r", **tomllib.loads(shipped_recipes()["full-chain-tiny"].read_text())}, "r")
    assert recipe.prune is not None
    target, text = prepare_target.fn(recipe.target), prepare_text.fn(recipe.text, recipe.seed)
    with caplog.at_level(logging.WARNING, "redraft"):
        prune_model.fn(recipe.prune, recipe.seed, target, text)
        assert "1024 are 4 times the widest layer's inputs" in caplog.text
        caplog.clear()
        prune_model.fn(recipe.prune.model_copy(update={"num_documents": 60}), recipe.seed, target, text)
        assert "widest layer" not in caplog.text
