"""Keys in turn: what runs, what waits and what is refused, without an engine."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from models.serving import Limits
from services.access import RequestError
from services.fair_queue import Cost, FairQueue, QueuedRequest

pytestmark = pytest.mark.anyio

ONE = Cost(sequences=1, tokens=100)
Asked = Callable[..., Awaitable["asyncio.Task[QueuedRequest]"]]


def turns(max_num_seqs: int = 4, **limits: Any) -> FairQueue:
    return FairQueue(Limits(**limits), max_num_seqs, max_model_len=1000)


async def settle() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


@pytest.fixture
async def asked() -> AsyncIterator[Asked]:
    """What asks for a turn, which is given at once or waited for; who still waits at the end is called off."""
    tasks: list[asyncio.Task[QueuedRequest]] = []

    async def ask(waits: FairQueue, key: str | None, cost: Cost = ONE) -> "asyncio.Task[QueuedRequest]":
        tasks.append(asyncio.ensure_future(waits.take(key, cost)))
        await settle()
        return tasks[-1]

    yield ask
    for task in tasks:
        task.cancel()


async def test_one_key_never_takes_all_of_the_engine_and_another_comes_in_at_once(asked: Asked) -> None:
    waits = turns()
    flood = [await asked(waits, "flooder") for _ in range(20)]
    assert sum(task.done() for task in flood) == waits.per_key == 3
    assert [task.result().priority for task in flood[:3]] == [0, 1, 2]
    other = await asked(waits, "other")
    assert other.result().priority == 0
    flood[0].result().end()
    flood[0].result().end()  # again
    await asyncio.sleep(0)
    assert sum(task.done() for task in flood) == 4


async def test_who_gives_way_is_told_of_the_first_request_and_of_the_last(asked: Asked) -> None:
    told: list[bool] = []
    waits = FairQueue(Limits(), 2, 1000, told.append)
    first, second, third = [await asked(waits, None) for _ in range(3)]
    assert told == [True]
    first.result().end()
    await asyncio.sleep(0)
    second.result().end()
    second.result().end()
    assert told == [True]
    third.result().end()
    assert told == [True, False]
    (await asked(waits, None)).result().end()
    assert told == [True, False] * 2


async def test_a_service_without_keys_may_be_taken_whole(asked: Asked) -> None:
    waits = turns(max_queued_requests=2)
    asked_for = [await asked(waits, None) for _ in range(6)]
    assert [task.result().priority for task in asked_for[:4]] == [0, 1, 2, 3]
    assert not any(task.done() for task in asked_for[4:])
    assert waits.cost(None, {"prompt": ["x"] * 4}, 0).sequences == 4
    with pytest.raises(RequestError, match="too many requests are waiting"):
        await waits.take(None, ONE)


async def test_keys_that_wait_get_the_same_number_of_tokens_whatever_the_size_of_their_requests(asked: Asked) -> None:
    waits, sizes, got = turns(max_num_seqs=1, max_share_per_key=1.0), {"large": 4000, "small": 500}, Counter[str]()
    running = (await asked(waits, "first")).result()
    waiting = {key: [await asked(waits, key, Cost(1, size)) for _ in range(64)] for key, size in sizes.items()}
    for _ in range(54):
        running.end()
        await settle()
        [(key, running)] = [(key, one.result()) for key in sizes for one in waiting[key] if one.done()]
        waiting[key] = [one for one in waiting[key] if not one.done()]
        got[key] += sizes[key]
    assert got["small"] == pytest.approx(got["large"], abs=4000)
    assert got["small"] > 20_000


async def test_a_request_that_needs_much_room_is_not_passed_by_for_ever(asked: Asked) -> None:
    waits = turns(max_num_seqs=4, max_share_per_key=1.0)
    small = [await asked(waits, f"key {number}") for number in range(4)]
    large = await asked(waits, "large", Cost(4, 100))
    later = [await asked(waits, "late") for _ in range(4)]
    for task in small:
        task.result().end()
    await asyncio.sleep(0)
    assert large.done()
    assert not any(task.done() for task in later)


async def test_who_leaves_while_waiting_or_running_holds_nobody_up(asked: Asked) -> None:
    waits = turns(max_num_seqs=1)
    running = await asked(waits, "one")
    gone, next_one = await asked(waits, "two"), await asked(waits, "three")
    gone.cancel()
    running.result().end()
    await asyncio.sleep(0)
    assert next_one.done()
    both = await asked(waits, "four")
    next_one.result().end()  # gives the turn to one who is called off before it hears of it
    both.cancel()
    await asyncio.sleep(0)
    assert (await asked(waits, "five")).done()


@pytest.mark.parametrize(
    ("limits", "keys", "status", "others"),
    [
        ({"max_queued_tokens_per_key": 250}, ["flooder"] * 3, 429, ["other"]),
        ({"max_queued_requests": 4}, ["flooder"] * 3, 429, ["other"]),
        ({"max_queued_requests": 2}, ["one", "two", "three"], 503, []),
    ],
    ids=["tokens", "requests", "all"],
)
async def test_what_waits_is_bounded_for_a_key_and_in_all(
    asked: Asked, limits: dict[str, Any], keys: list[str], status: int, others: list[str]
) -> None:
    waits = turns(max_num_seqs=1, **limits)
    tasks = [await asked(waits, key) for key in keys]
    assert [task.done() for task in tasks] == [True, False, False]
    with pytest.raises(RequestError) as refused:
        await waits.take("flooder", ONE)
    assert refused.value.status == status
    assert [one for one in others if not (await asked(waits, one)).done()] == others  # they are still taken


@pytest.mark.parametrize(
    ("body", "cost"),
    [
        ({"messages": [], "max_tokens": 50}, Cost(1, 50)),
        ({"input": [], "max_tokens": None}, Cost(1, 1000)),
        ({"messages": [], "max_completion_tokens": 20, "max_tokens": 50, "n": 3}, Cost(3, 60)),
        ({"messages": []}, Cost(1, 1000)),
        ({"messages": [], "max_tokens": 0}, Cost(1, 1000)),
        ({"messages": [], "max_tokens": 10**30}, Cost(1, 1000)),
        ({"prompt": "x"}, Cost(1, 16)),
        ({"prompt": [1, 2, 3]}, Cost(1, 16)),
        ({"prompt": ["x", "y"], "best_of": 2, "max_tokens": 5}, Cost(4, 20)),
        ({"prompt": [[1], [2]], "max_tokens": 5}, Cost(2, 10)),
        ({"prompt": []}, Cost(1, 16)),
    ],
    ids=str,
)
def test_a_request_costs_what_it_may_take(body: dict[str, Any], cost: Cost) -> None:
    waits = turns(max_num_seqs=8)
    assert waits.cost("key", body, 0) == cost
    assert waits.cost("key", body, 400) == (cost.sequences, cost.tokens + 100)


def test_more_sequences_than_a_key_may_run_are_refused() -> None:
    with pytest.raises(RequestError, match="n times the number of prompts is 8; at most 6 run at once") as refused:
        turns(max_num_seqs=8).cost("key", {"prompt": ["x"] * 4, "n": 2}, 0)
    assert (refused.value.status, refused.value.param) == (400, "n")
