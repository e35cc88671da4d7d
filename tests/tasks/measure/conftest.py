from collections.abc import Iterator

import pytest
from rich.progress import Progress

from tasks.measure.run import Bar


@pytest.fixture(scope="session")
def bar() -> Iterator[Bar]:
    """A bar that nobody sees."""
    progress = Progress(disable=True)
    return Bar(progress, progress.add_task("", total=1))
