"""Engines of vLLM for the tests of a file, and tables of costs that they begin with."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from models.engines.vllm import Params
from models.engines.vllm.engine import VllmEngine

BLOCK = 32  # tokens of a block of the prefix cache; 128 by default, which no short prompt fills
Loop = asyncio.AbstractEventLoop


def short(worker: str = "", **keys: Any) -> Params:
    """Return the settings of an engine of short answers, with a worker that no recipe may name."""
    params = Params(**{"max_model_len": 256, "max_num_seqs": 16, "extra": {"block_size": BLOCK}, **keys})
    extra = {"worker_cls": f"tests.models.engines.workers.{worker}"} if worker else {}
    return params.model_copy(update={"extra": {**params.extra, **extra}})


@contextmanager
def running(
    loop: Loop, target: Path, draft: Path | None, costs: Path | None = None, captures: bool = False, **keys: Any
) -> Iterator[VllmEngine]:
    """Run an engine, whose draft is version 1; what `costs` holds of it is taken for measured."""
    params = short(**keys)
    engine = loop.run_until_complete(
        VllmEngine.start(target, draft, params, draft_version="1", costs=costs, captures=captures)
    )
    try:
        assert costs is None or (engine.setup is not None and engine.setup.known_cost() is not None)
        yield engine
    finally:
        loop.run_until_complete(engine.close())
