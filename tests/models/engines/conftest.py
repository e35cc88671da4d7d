"""Tests that are coroutines run in the event loop that engines live in."""

import inspect

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    given = pyfuncitem.funcargs
    wanted = {name: given[name] for name in inspect.signature(pyfuncitem.obj).parameters}
    given["loop"].run_until_complete(pyfuncitem.obj(**wanted))
    return True
