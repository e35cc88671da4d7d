"""Events against a real HTTP server."""

import socket
from collections.abc import Iterator

import pytest

from infra.events import ACCEPTANCE_FELL, Emitter
from tests.infra.collector import Collector, collecting


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as server:
        yield server


def test_an_event_says_what_happened_to_which_domain(collector: Collector) -> None:
    emitter = Emitter(collector.api)
    assert emitter.emit(ACCEPTANCE_FELL, "code", {"draft": 3, "served": 1.1})
    emitter.close()
    (event,) = collector.got
    assert (event["path"], event["event"]) == ("/api/events", ACCEPTANCE_FELL)
    assert event["resource"]["prefect.resource.id"] == "redraft.domain.code"
    assert event["payload"] == {"draft": 3, "served": 1.1}
    assert (emitter.sent, emitter.dropped) == (1, 0)


def test_an_event_that_is_refused_is_dropped_and_counted(collector: Collector) -> None:
    collector.status = 503
    emitter = Emitter(collector.api)
    assert emitter.emit(ACCEPTANCE_FELL, "code", {})
    emitter.close()
    assert (emitter.sent, emitter.dropped) == (0, 1)
    assert "503" in (emitter.last_error or "")


def test_nothing_waits_for_an_orchestrator_that_does_not_answer_or_is_down(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infra.events.TIMEOUT_S", 600)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        emitter = Emitter(f"http://127.0.0.1:{silent.getsockname()[1]}/api")
        assert all(emitter.emit(ACCEPTANCE_FELL, "code", {}) for _ in range(20))
        assert (emitter.sent, emitter.dropped) == (0, 0)  # the first has no answer yet
    emitter.close(60)
    assert (emitter.sent, emitter.dropped) == (0, 20)


@pytest.mark.slow
def test_a_full_queue_drops_without_waiting(collector: Collector) -> None:
    collector.delay_s = 0.1
    emitter = Emitter(collector.api, capacity=1)
    taken = [emitter.emit(ACCEPTANCE_FELL, "code", {}) for _ in range(10)]
    assert 1 <= sum(taken) <= 2
    emitter.close()
    assert emitter.sent + emitter.dropped == 10


def test_without_an_orchestrator_events_are_dropped_and_counted() -> None:
    emitter = Emitter("")
    assert not emitter.emit(ACCEPTANCE_FELL, "code", {})
    emitter.close()
    assert emitter.dropped == 1
