"""The short half of the tutorial works as it is written."""

from pathlib import Path

import pytest

from tests import tutorial

pytestmark = pytest.mark.engine


@pytest.mark.timeout(900)
def test_the_short_half_of_the_tutorial_works_as_it_is_written(tmp_path: Path) -> None:
    tutorial.run(1, tmp_path)  # raises where a command fails
