"""The stage that prunes: what it calibrates on is enough, or somebody is told."""

import logging
from pathlib import Path

import pytest

from models.recipe import load_recipe
from tasks.prepare_target import prepare_target
from tasks.prepare_text import prepare_text
from tasks.prune_model import prune_model

pytestmark = pytest.mark.slow


def test_too_short_a_calibration_is_told_with_what_would_do(home: Path, caplog: pytest.LogCaptureFixture) -> None:
    recipe = load_recipe("full-chain-tiny")
    target, text = prepare_target.fn(recipe.target), prepare_text.fn(recipe.text, recipe.seed)
    with caplog.at_level(logging.WARNING, "redraft"):
        prune_model.fn(recipe.prune, recipe.seed, target, text)
        assert "1024 are 4 times the widest layer's inputs" in caplog.text
        caplog.clear()
        prune_model.fn(recipe.prune.model_copy(update={"num_documents": 60}), recipe.seed, target, text)
        assert "widest layer" not in caplog.text
