"""One service for all tests that ask one."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.world import World, make_target


@pytest.fixture(scope="session")
def world(
    tiny_target: Path, engine: Any, loop: asyncio.AbstractEventLoop, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[World]:
    """A running service; a test that changes what it serves puts it back."""
    home = tmp_path_factory.mktemp("world")
    make_target(tiny_target, home / "target", engine, loop)
    world = World(home, home / "target", serve={"capture": {"share": 1.0}})
    with world.start():
        yield world


@pytest.fixture
def client(world: World) -> Iterator[openai.OpenAI]:
    """The stock client."""
    with world.client() as client:
        yield client
