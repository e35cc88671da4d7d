"""The short half of the tutorial works as it is written."""

from pathlib import Path

import pytest

from tests import tutorial

pytestmark = pytest.mark.engine


MOST_S = 300  # two quiet cores need less than the three minutes of its heading; slower ones get more


@pytest.mark.timeout(600)
def test_the_short_half_of_the_tutorial_works_as_it_is_written(tmp_path: Path) -> None:
    assert tutorial.run(1, tmp_path) <= MOST_S
