"""Tests that are coroutines run in the event loop that their engine lives in."""

import asyncio
import inspect

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
