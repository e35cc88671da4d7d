"""Engines of vLLM for the tests of a file, and tables of costs that they begin with."""

import asyncio
import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import vllm

from models.core.throughput.cost import Cost, Time, save_cost
from models.engines import Completion, Sampling
from models.engines.vllm import Params
from models.engines.vllm.engine import VllmEngine
from models.engines.vllm.measuring import measured_for
from tests.models.engines.answers import answer_all, golden_of, require_none_different

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


def keep_costs(
    folder: Path, target: Path, draft: Path, dtype: str, times: Sequence[Time], verified: int = 1, place: str = "cpu"
) -> Path:
    """Write what steps of an eager engine take into a folder, and return that."""
    facts = measured_for(target, draft, dtype, True, vllm.__version__, verified, place)
    save_cost(Cost.measured(times, facts), folder / f"{hashlib.sha256(facts.encode()).hexdigest()[:16]}.json")
    return folder


async def require_swaps(
    engine: Any, asked: Sequence[list[int]], num_tokens: int, first: Path, second: Path, threshold: float, apart: bool
) -> dict[str, list[Completion]]:
    """Hold an engine to it that no draft changes its output; where two are kept `apart` it tells which is loaded.

    Returns the answers by the first draft, by the second, without and again by the second.
    """
    sampling = Sampling(max_tokens=num_tokens, ignore_eos=True, num_logprobs=2)

    async def ask(tag: str) -> list[Completion]:
        return await answer_all(engine, asked, sampling, len(asked), tag)

    assert await engine.check_draft(first) < 0.05
    found = {"first": await ask("first")}
    await engine.swap_draft(second, "2")
    assert await engine.check_draft(second) < 0.05
    if apart:
        with pytest.raises(ValueError, match="of the loaded draft is off by"):
            await engine.check_draft(first)
    found["second"] = await ask("second")
    await engine.set_speculation(False)
    found["off"] = await ask("off")
    await engine.set_speculation(True)
    found["again"] = await ask("again")
    first_by, second_by = ([(one.drafted_ids, one.accepted) for one in found[name]] for name in ("first", "second"))
    assert first_by != second_by or not apart
    for name, version in (("first", "1"), ("second", "2"), ("again", "2")):
        require_none_different(golden_of(found["off"]), found[name], threshold)
        assert sum(sum(one.drafted) for one in found[name]) > 0
        assert {one.draft_version for one in found[name]} == {version}
    assert sum(sum(one.accepted) for one in found["first"]) > 0
    assert not any(sum(one.drafted) or one.speculating for one in found["off"])
    return found
