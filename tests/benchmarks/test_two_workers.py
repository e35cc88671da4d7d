from collections.abc import Callable
from pathlib import Path

import pytest

from models.core.learning.parallel import Workers
from tests.benchmarks.two_workers import Summed, Unweighted
from tests.models.core.learning.test_parallel import TOLERANCE, distilled, of_one, of_two, off
from tests.models.drafts.answered import answers_of, prompts


@pytest.mark.parametrize("made", [Summed, Unweighted])
def test_the_comparison_sees_gradients_that_are_put_together_wrongly(
    tiny_target: Path, tmp_path: Path, made: Callable[..., Workers]
) -> None:
    samples = answers_of(tiny_target, prompts(19))
    one = of_one(distilled, tiny_target, samples, tmp_path / "one")
    two = of_two(distilled, made, tiny_target, samples, tmp_path / "two")
    assert max(off(one, two)) > 10 * TOLERANCE
