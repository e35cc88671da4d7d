"""The folder of captured states fills up, and is written to again once there is room; names are kept by the loop."""

import asyncio
import threading
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest

from infra.querylog import CapturedFiles
from models.engines.vllm.capture import Claim, Ring
from models.serving import Capture as Params
from services import capture
from services.capture import MIB, Capture
from services.questions import Origin
from tests.services.test_recorder import completion

ASKED = Origin("asked", "chat", "full", None)

pytestmark = pytest.mark.anyio


async def test_a_full_folder_takes_no_more_until_files_are_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capture, "SWEEP_S", 0.01)
    files = CapturedFiles(tmp_path / "queries.db")
    files.make()
    large = files.path_of("trained on soon")
    large.write_bytes(bytes(MIB))
    # The engine is told of requests that end, and none does here.
    states = Capture(None, files, Params(share=1.0, max_disk_mib=1.0), "target", width=8)  # type: ignore[arg-type]
    assert states.name_for("first", ASKED) == ""
    sweeping = asyncio.create_task(states.run())
    await asyncio.sleep(0.1)
    assert states.name_for("second", ASKED) == ""
    assert states.counts == {"no space": 2}
    assert large.exists()
    large.unlink()
    async with asyncio.timeout(60):
        while states.name_for("third", ASKED) != "third":
            await asyncio.sleep(0.01)
    sweeping.cancel()


class Fickle(OrderedDict[str, None]):
    """Loses a name once another thread than the event loop's has seen it, as if the loop had forgotten it then."""

    def __contains__(self, name: object) -> bool:
        found = super().__contains__(name)
        if found and threading.current_thread() is not threading.main_thread():
            self.popitem()
        return found


class Engine:
    """Holds states as a worker does, and remembers whose were claimed."""

    def __init__(self) -> None:
        self.ring, self.claimed = Ring([1], 1 << 20), list[str]()

    async def settle_states(self, claims: list[Claim]) -> dict[str, int]:
        self.claimed += [claim.name for claim in claims]
        return self.ring.settle(claims)


async def test_a_name_that_the_loop_forgets_meanwhile_does_not_end_the_thread_that_settles_it(tmp_path: Path) -> None:
    engine: Any = Engine()
    states = Capture(engine, CapturedFiles(tmp_path / "queries.db"), Params(share=1.0), "target", width=8)
    states._named = Fickle()
    assert states.name_for("asked", ASKED) == "asked"
    await asyncio.to_thread(states.settle, completion("asked"), None)  # as the recorder does, in its own thread
    async with asyncio.timeout(60):
        while not engine.claimed:
            await asyncio.sleep(0.01)
    await asyncio.to_thread(states.settle, completion("asked"), None)  # of whom nothing is held any more
    await asyncio.sleep(0.1)
    assert engine.claimed == ["asked"]
