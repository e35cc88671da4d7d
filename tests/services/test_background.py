"""What runs beside the requests may fail, and is seen to."""

import asyncio

from services.background import BackgroundTasks


def test_a_task_that_fails_is_told_of_and_keeps_nothing_from_closing() -> None:
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

    async def live() -> dict[str, str]:
        background = BackgroundTasks()
        for task in (fails, goes_on, fails_as_it_ends):
            background.start(task.__name__, task())
        while not background.failed:
            await asyncio.sleep(0)
        before = dict(background.failed)
        await background.close()
        assert background.failed.keys() == {"fails", "fails_as_it_ends"}
        return before

    assert asyncio.run(live()) == {"fails": "TypeError"}
    assert closed == ["goes on"]
