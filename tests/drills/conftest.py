"""Drills start from the same finished tiny build as the flows' tests."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.drills.strangers import Strangers
from tests.flows.conftest import built, cli_in, home, orchestrator, rows, target_dir
from tests.world import World, make_target

__all__ = ["built", "cli_in", "home", "orchestrator", "rows", "target_dir"]

COMPILE_S = 2.0


@pytest.fixture(scope="module")
def strangers(
    tiny_target: Path, engine: Any, loop: Any, store: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Strangers]:
    home = tmp_path_factory.mktemp("strangers")
    shutil.copy(store, home)
    make_target(tiny_target, home / "target", engine, loop)
    serve = {"structured": {"enabled": True, "timeout_s": COMPILE_S}, "front": "auto"}
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("RAY_SERVE_ENABLE_HA_PROXY", "1")  # F40: whatever it says, all of this holds
        strangers = Strangers(World(home, home / "target", serve=serve))
        try:
            yield strangers
        finally:
            strangers.stop()
