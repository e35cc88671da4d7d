"""Each family of drafts in turn, and a draft of it for the two-layer target."""

from pathlib import Path

import pytest

from models import catalog
from models.core.drafting.draft_families import family_named
from models.drafts import Family
from tests.models.drafts.tiny import save_tiny


@pytest.fixture(scope="module", params=catalog.names("drafts"))
def family(request: pytest.FixtureRequest) -> Family:
    return family_named(request.param)


@pytest.fixture(scope="module")
def saved(family: Family, tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(family, tiny_target, tmp_path_factory.mktemp("draft"))
