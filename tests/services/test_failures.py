"""A failure in a log: where, and of which class, without a word of the request."""

import asyncio
import json
import logging
import logging.config

import pytest

from services.failures import VLLM_LOGGING, BackgroundTasks, PlainFormatter, place_of

CLIENTS = "(what the client wrote"


def fail() -> None:
    try:
        raise ValueError(CLIENTS)
    except ValueError as error:
        raise RuntimeError(f"can't compile {CLIENTS}") from error


def test_class_and_place_of_a_failure_and_its_cause_are_told_and_no_message() -> None:
    with pytest.raises(RuntimeError) as failed:
        fail()
    told = place_of(failed.value)
    assert told.index("builtins.RuntimeError") < told.index("builtins.ValueError")
    assert told.count(" in fail") == 2
    assert CLIENTS not in told


def test_a_loop_of_causes_ends() -> None:
    first, second = ValueError(), ValueError()
    first.__cause__, second.__cause__ = second, first
    assert place_of(first).count("ValueError") == 2


def test_what_vllm_logs_of_an_exception_has_no_message(capfd: pytest.CaptureFixture[str]) -> None:
    with open(VLLM_LOGGING["VLLM_LOGGING_CONFIG_PATH"]) as file:
        config = json.load(file)
    assert config["formatters"]["plain"]["()"] == f"{PlainFormatter.__module__}.{PlainFormatter.__qualname__}"
    config["loggers"] = {"a logger of this test": config["loggers"]["vllm"]}
    config["handlers"]["vllm"]["stream"] = "ext://sys.stderr"
    logging.config.dictConfig(config)
    try:
        fail()
    except RuntimeError:
        logging.getLogger("a logger of this test").exception("Failed to compile grammar for request %s", 7)
    said = capfd.readouterr().err
    assert "Failed to compile grammar for request 7" in said
    assert "RuntimeError" in said
    assert CLIENTS not in said


@pytest.mark.anyio
async def test_a_task_that_fails_is_told_of_and_keeps_nothing_from_closing() -> None:
    closed = []

    async def fails() -> None:
        raise TypeError("the text of a request")

    async def goes_on() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            closed.append("goes on")

    async def fails_as_it_ends() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            raise OSError("no disk")

    background = BackgroundTasks()
    for task in (fails, goes_on, fails_as_it_ends):
        background.start(task.__name__, task())
    while not background.failed:
        await asyncio.sleep(0)
    assert background.failed == {"fails": "TypeError"}
    await background.close()
    assert background.failed.keys() == {"fails", "fails_as_it_ends"}
    assert closed == ["goes on"]
