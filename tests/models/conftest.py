import tomllib
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

from models.recipe import shipped_recipes
from tests.models.regimes.world import load


@pytest.fixture
def model(tiny_target: Path) -> PreTrainedModel:
    """The two-layer target in float32."""
    return load(tiny_target)


@pytest.fixture
def tables() -> dict[str, Any]:
    """The tiny recipe's tables, free to be changed."""
    return {"name": "r", **tomllib.loads(shipped_recipes()["tiny"].read_text())}
