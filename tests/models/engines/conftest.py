"""Tests that are coroutines run in the event loop that their engine lives in."""

import asyncio
import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    given = pyfuncitem.funcargs
    wanted = {name: given[name] for name in inspect.signature(pyfuncitem.obj).parameters}
    run = given["loop"].run_until_complete if "loop" in given else asyncio.run
    run(pyfuncitem.obj(**wanted))
    return True


@pytest.fixture
def no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No operator in C++ is there, and none can be compiled."""
    from models.engines.vllm.patches import attention, fused_eagle3, small_batch_gemm

    for name, value in (("CXX", "no-compiler"), ("TORCH_EXTENSIONS_DIR", tmp_path), ("VLLM_CACHE_ROOT", tmp_path)):
        monkeypatch.setenv(name, str(value))
    kept = [module._is_built for module in (attention, fused_eagle3, small_batch_gemm)]
    for one in kept:
        one.cache_clear()
    yield
    for one in kept:
        one.cache_clear()
