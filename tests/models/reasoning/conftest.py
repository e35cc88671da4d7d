from pathlib import Path

import pytest

from tests.models.reasoning.thinking import make_small


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of the target's vocabulary that says other things."""
    return make_small(tmp_path_factory.mktemp("small"))
