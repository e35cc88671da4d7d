"""Drafts of the families that have no other drill are swapped while clients are answered."""

from pathlib import Path
from typing import Any

import pytest

from tests.drills.load import Asker, Load, quiet_answers
from tests.world import World, make_target

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

NUM_CLIENTS, NUM_SWAPS = 4, 4


@pytest.mark.parametrize("family", ["eagle", "parallel_eagle", "dflash", "medusa"])
def test_swaps_of_a_family_cut_and_change_no_answer_and_each_draft_passes_its_probation(
    family: str, tiny_target: Path, engine: Any, loop: Any, tmp_path: Path
) -> None:
    make_target(tiny_target, tmp_path / "target", engine, loop)
    world = World(tmp_path, tmp_path / "target", family=family)
    service = world.start()
    try:
        first, second = world.versions
        world.wait_for_draft(first)
        wanted = quiet_answers(world)
        with Load(world.url, wanted, [Asker()] * NUM_CLIENTS) as load:
            for number in [second, first] * (NUM_SWAPS // 2):
                world.registry.promote("draft", number)
                world.wait_for_draft(number)
        status = world.status()
    finally:
        service.stop(grace_s=60)
    assert load.ended_well(), load.outcomes
    assert status["speculating"]
    assert status["refused"] == {}
