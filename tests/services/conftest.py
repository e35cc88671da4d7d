"""One service for all tests that ask one."""

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.models.reasoning.thinking import make_small
from tests.world import MAX_MODEL_LEN, World, make_target


@pytest.fixture(scope="session")
def world(
    tiny_target: Path,
    engine: Any,
    loop: asyncio.AbstractEventLoop,
    store: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[World]:
    """A running service; a test that changes what it serves puts it back."""
    home = tmp_path_factory.mktemp("world")
    shutil.copy(store, home)
    make_target(tiny_target, home / "target", engine, loop)
    small = {"model": str(make_small(home / "small")), "engine": {"name": "torch", "max_model_len": MAX_MODEL_LEN}}
    world = World(home, home / "target", serve={"capture": {"share": 1.0}, "reasoning": small})
    with world.start():
        yield world


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """Tests that are coroutines run as a replica does."""
    return "asyncio"


@pytest.fixture
def client(world: World) -> Iterator[openai.OpenAI]:
    """The stock client."""
    with world.client() as client:
        yield client
