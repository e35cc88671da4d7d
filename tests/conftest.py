"""What tests share: a two-layer target and a draft for it, made once, and one engine for the whole session."""

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from infra.doctor import openmp_preload
from models.engines.vllm import child_environment

if TYPE_CHECKING:
    import torch

# vLLM starts its own processes, which must inherit what its CPU engine needs.
_ENGINE_ENVIRONMENT = child_environment() | openmp_preload()


@pytest.fixture(scope="session", autouse=True)
def _engine_environment() -> Iterator[None]:
    before = {name: os.environ.get(name) for name in _ENGINE_ENVIRONMENT}
    os.environ.update(_ENGINE_ENVIRONMENT)
    yield
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A two-layer Llama with random weights."""
    from models.targets import random

    directory = tmp_path_factory.mktemp("target")
    random.build(random.Params(), directory)
    return directory


@pytest.fixture(scope="session")
def tiny_draft(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained EAGLE-3 head of 64 tokens for it."""
    return make_draft(tiny_target, tmp_path_factory.mktemp("draft"), seed=0)


def make_draft(target: Path, directory: Path, seed: int, vocab_size: int = 64) -> Path:
    """Save a head with seeded noise on its weights, so that two seeds draft differently."""
    from infra.manifest import write_manifest
    from models.drafts import eagle3

    counts = np.zeros(259)
    counts[3 : 3 + vocab_size] = 1
    head = eagle3.create(eagle3.Params(vocab_size=vocab_size), target, counts)
    shake(head, 0.02, seed)
    eagle3.save(head, directory)
    write_manifest(directory)
    return directory


def shake(draft: "torch.nn.Module", scale: float, seed: int) -> None:
    """Add seeded noise to a draft's weights."""
    import torch

    rng = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter += scale * torch.randn(parameter.shape, generator=rng)


@pytest.fixture(scope="session")
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    """The event loop that the session's engine lives in."""
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


@pytest.fixture(scope="session")
def engine(tiny_target: Path, tiny_draft: Path, loop: asyncio.AbstractEventLoop) -> Iterator["object"]:
    """One engine for the session; a test that changes it puts it back."""
    from models.engines.vllm import Params
    from models.engines.vllm.engine import VllmEngine

    params = Params(num_draft_tokens=3, max_model_len=256, max_num_seqs=64, extra={"enable_prefix_caching": False})
    engine = loop.run_until_complete(VllmEngine.start(tiny_target, tiny_draft, params, draft_version="1"))
    yield engine
    loop.run_until_complete(engine.close())
