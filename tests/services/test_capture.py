"""The folder of captured states fills up, and is written to again once there is room."""

import asyncio
from pathlib import Path

import pytest

from infra.captured import CapturedFiles
from models.serving import Capture as Params
from services import capture
from services.capture import MIB, Capture
from services.questions import Origin

ASKED = Origin("asked", "chat", "full", None)


def test_a_full_folder_takes_no_more_until_files_are_gone_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capture, "SWEEP_S", 0.01)
    files = CapturedFiles(tmp_path / "queries.db")
    files.make()
    large = files.path_of("trained on soon")
    large.write_bytes(bytes(MIB))

    async def fill_and_empty() -> None:
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

    asyncio.run(fill_and_empty())
