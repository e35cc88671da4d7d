"""What tests of models share beside the two-layer target."""

import tomllib
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

from models.recipe import shipped_recipes
from models.targets import random
from tests.models.regimes.world import load


@pytest.fixture
def model(tiny_target: Path) -> PreTrainedModel:
    """The two-layer target in float32."""
    return load(tiny_target)


@pytest.fixture
def tables() -> dict[str, Any]:
    """The tiny recipe's tables, free to be changed."""
    return {"name": "r", **tomllib.loads(shipped_recipes()["tiny"].read_text())}


@pytest.fixture(scope="session")
def deep_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A four-layer Llama with random weights."""
    directory = tmp_path_factory.mktemp("deep")
    random.build(random.Params(num_layers=4), directory)
    return directory
