"""The target of all pairs."""

from pathlib import Path

import pytest

from models.targets import random


@pytest.fixture(scope="session")
def pair_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers, wide enough that a half of it has groups of 128."""
    directory = tmp_path_factory.mktemp("pair-target")
    random.build(random.Params(num_heads=4, num_kv_heads=2), directory)
    return directory
