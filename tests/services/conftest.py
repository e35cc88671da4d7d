"""One service for all tests that ask one."""

import asyncio
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.models.reasoning.thinking import make_small
from tests.world import MAX_MODEL_LEN, World, make_target


@pytest.fixture(scope="session")
def make_world(
    engine: Any, loop: asyncio.AbstractEventLoop, store: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., World]:
    """Return what makes a service of a target that a test may start, by what of its settings differs."""

    def make(target: Path, **changed: Any) -> World:
        home = tmp_path_factory.mktemp("world")
        shutil.copy(store, home)
        make_target(target, home / "target", engine, loop)
        return World(home, home / "target", **changed)

    return make


@pytest.fixture(scope="session")
def world(
    tiny_target: Path, make_world: Callable[..., World], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[World]:
    """A running service; a test that changes what it serves puts it back."""
    model = make_small(tmp_path_factory.mktemp("small"))
    small = {"model": str(model), "engine": {"name": "torch", "max_model_len": MAX_MODEL_LEN}}
    world = make_world(tiny_target, serve={"capture": {"share": 1.0}, "reasoning": small})
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
