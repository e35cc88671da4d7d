"""What a refresh tells of itself, however it ends."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import pytest
import torch

from infra.priority import PERIOD_S
from infra.trigger_store import WAITS_FOR_MEMORY, Need, TriggerStore
from infra.triggers import Fallen, Fell, Running
from infra.versions import Version
from models.recipe import load_recipe
from tasks.promote import Outcome
from tasks.trigger.acknowledge import RESULTS, RefreshOutcome, acknowledged, short_of_memory
from tests.tags import draft_tags


@pytest.fixture
def trigger(home: Path) -> TriggerStore:
    trigger = TriggerStore(home / "queries.db")
    trigger.tell({"code": Fell(draft=1, promised=1.7, served=1.1, now_ms=1)})
    trigger.note(Need(gib=0.01))
    return trigger


def test_every_outcome_of_a_refresh_means_something_to_the_trigger() -> None:
    assert {name for union in get_args(RefreshOutcome) for name in get_args(union)} == RESULTS.keys()
    assert set(get_args(Outcome)) <= RESULTS.keys()


Ended = tuple[RefreshOutcome, Version | None]


def refresh(work: Callable[[], Ended]) -> Ended:
    """Do some work as a refresh that is acknowledged."""
    return acknowledged(lambda recipe: work())(load_recipe("tiny"))


@pytest.mark.slow
@pytest.mark.parametrize("outcome", RESULTS)
def test_an_outcome_is_told_and_the_domain_runs_until_then(trigger: TriggerStore, outcome: RefreshOutcome) -> None:
    def work() -> Ended:
        seen = trigger.state()
        assert (seen.running, type(seen.domains["code"])) == (True, Running)
        return outcome, None

    assert refresh(work) == (outcome, None)
    seen = trigger.state()
    assert (seen.running, seen.last_run.outcome) == (False, outcome)
    assert seen.domains.keys() == (set() if RESULTS[outcome] == "promoted" else {"code"})


@pytest.mark.parametrize(
    ("error", "outcome", "attempts"),
    [
        (FloatingPointError(), "failed", 1),
        (KeyboardInterrupt(), "stopped", 0),
        (torch.OutOfMemoryError("CUDA out of memory"), WAITS_FOR_MEMORY, 0),
    ],
)
def test_an_error_is_told_and_raised_and_who_stops_a_run_or_lacks_memory_costs_no_attempt(
    trigger: TriggerStore, error: BaseException, outcome: str, attempts: int
) -> None:
    def work() -> Ended:
        raise error

    with pytest.raises(type(error)):
        refresh(work)
    seen = trigger.state()
    fallen = seen.domains["code"]
    assert isinstance(fallen, Fallen)
    assert (seen.last_run.outcome, fallen.fall.attempts, fallen.fall.wait_s) == (outcome, attempts, 300)


def test_the_memory_of_the_gpu_that_a_refresh_runs_on_is_looked_at(
    trigger: TriggerStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = {"cuda:0": 1 << 28, "cuda:1": 1 << 40}
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free[device], 1 << 40))
    recipe = load_recipe("tiny")

    def short_of(device: str, starts: bool = True) -> str:
        distill = recipe.distill.model_copy(update={"device": device})
        return short_of_memory(recipe.model_copy(update={"distill": distill}), trigger.state(), starts)

    assert short_of("cuda:0") == "0.2 GiB of cuda:0 to spare, 1.0 wanted"
    assert [short_of("cuda:1"), short_of("cpu"), short_of("cuda:0", starts=False)] == ["", "", ""]
    with pytest.raises(ValueError, match="device cuda:2 is not here"):
        short_of("cuda:2")


def test_without_memory_a_refresh_does_not_begin_and_is_wanted_again(trigger: TriggerStore) -> None:
    trigger.note(Need(gib=1e6))
    assert refresh(lambda: pytest.fail("it began")) == (WAITS_FOR_MEMORY, None)
    seen = trigger.state()
    assert (seen.waits_for_memory, type(seen.domains["code"])) == (True, Fallen)


@pytest.mark.slow
def test_what_a_refresh_took_is_what_the_next_one_wants(trigger: TriggerStore) -> None:
    def work() -> Ended:
        held = bytearray(1 << 28)
        time.sleep(3 * PERIOD_S)
        number = 1 + bool(held)
        return "refused", Version(kind="draft", number=number, sha256="a" * 64, tags=draft_tags(), created_ms=0)

    refresh(work)
    assert 0.25 < trigger.state().need.gib < 8


def test_a_trigger_that_can_not_be_written_stops_no_refresh(trigger: TriggerStore, home: Path) -> None:
    for file in home.glob("queries.db*"):
        file.unlink()
    (home / "queries.db").write_bytes(b"x" * 4096)
    assert refresh(lambda: ("refused", None)) == ("refused", None)
