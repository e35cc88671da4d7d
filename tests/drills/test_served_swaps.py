"""F25: drafts of every family that is served are swapped in a row while clients are answered."""

from pathlib import Path
from typing import Any

import pytest

from tests.drills.load import Client, Load, quiet_answers
from tests.world import World, make_target

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1200)]

NUM_CLIENTS = 4
NUM_SWAPS = {"eagle3": 100, "eagle": 4, "parallel_eagle": 4, "dflash": 4, "medusa": 4}


@pytest.mark.parametrize(("family", "num_swaps"), NUM_SWAPS.items())
def test_swaps_in_a_row_fail_cut_and_change_no_answer_and_each_draft_passes_its_probation(
    family: str, num_swaps: int, tiny_target: Path, engine: Any, loop: Any, tmp_path: Path
) -> None:
    make_target(tiny_target, tmp_path / "target", engine, loop)
    world = World(tmp_path, tmp_path / "target", family=family)
    service = world.start()
    try:
        first, second = world.versions
        world.wait_for_draft(first)
        wanted = quiet_answers(world)
        with Load(world.url, wanted, [Client()] * NUM_CLIENTS) as load:
            for number in [second, first] * (num_swaps // 2):
                world.registry.promote("draft", number)
                world.wait_for_draft(number)
        status = world.status()
    finally:
        service.stop(grace_s=60)
    print(f"{num_swaps} swaps: {dict(load.outcomes)}")
    assert load.ended_well(), load.outcomes
    assert status["swaps"] == num_swaps
    assert status["speculating"]
    assert status["refused"] == {}
