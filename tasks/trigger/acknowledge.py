"""Say that a refresh runs, and what came of it, so that what asked for it knows (infra/triggers.py).

Whether there is memory is told by what the last one took or, before the first, by the champions' files. A refresh also
looks at the memory of its GPU. Who only asks for it does not: to look takes some.
"""

from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import wraps
from typing import Literal

import torch

from infra.home import is_served
from infra.priority import GIB, Watchdog, gives_way, own_gib, read_memory
from infra.registry import open_registry
from infra.settings import load_settings
from infra.trigger_store import WAITS_FOR_MEMORY, Need, TriggerState, TriggerStore
from infra.triggers import Ok, Result, Retry
from infra.versions import Version, cached
from models.core.layers.kernels import is_out_of_memory, require_device
from models.recipe import Recipe
from tasks.promote import Outcome
from tasks.stages import run_logger
from tasks.stages.throttle import device_of

RefreshOutcome = Outcome | Literal["nothing to do", "waits for memory"]
Refresh = Callable[[Recipe], tuple[RefreshOutcome, Version | None]]
RESULTS: dict[RefreshOutcome, Result] = {
    "promoted": "promoted",
    "already trained": "promoted",
    "undecided": "progress",
    "outdated": "outdated",
    "nothing to do": "deferred",
    WAITS_FOR_MEMORY: "deferred",
    "refused": "failed",
    "waits for approval": "failed",
}
# What a refresh took before counts for less with each further one.
FADES = 0.9
# What the libraries hold before anything is loaded.
LIBRARIES_GIB = 1.0
# Bytes held for each byte of a file: of the target as it is; of a draft, stored in 16 bits, in float32 with gradients,
# two moments and a mean.
TARGET_FACTOR, DRAFT_FACTOR = 1.0, 10.0


def acknowledged(refresh: Refresh) -> Refresh:
    """Return a refresh that acknowledges the wish for it when it starts, and tells what came of it.

    Where memory is short it does not begin and, beside a service, goes on no longer; either way it is wanted again once
    there is room. A run that is killed tells nothing, and is found gone. The trigger is only told: what it can't keep
    stops no run.
    """

    @wraps(refresh)
    def told(recipe: Recipe) -> tuple[RefreshOutcome, Version | None]:
        retry = Retry(first_s=recipe.schedule.retry_s, most_s=recipe.schedule.max_retry_s)
        settings = load_settings()
        trigger = TriggerStore(settings.querylog)
        with ExitStack() as held:
            try:
                end = held.enter_context(trigger.run(retry))
                seen = trigger.state()
            except (OSError, ValueError) as error:
                run_logger().warning("the trigger's state can't be written: %s", error)
                return gives_way(refresh)(recipe)
            dog = Watchdog(lambda: is_served(settings.home), lambda why: _tell(end, "deferred", WAITS_FOR_MEMORY))
            try:
                if short := short_of_memory(recipe, seen, starts=True):
                    run_logger().warning("the refresh waits for memory: %s", short)
                    _tell(end, "deferred", WAITS_FOR_MEMORY)
                    return WAITS_FOR_MEMORY, None
                with dog.watching():
                    outcome, version = refresh(recipe)
            except Exception as error:
                lacks_memory = is_out_of_memory(error)
                _tell(end, *(("deferred", WAITS_FOR_MEMORY) if lacks_memory else ("failed", "failed")))
                raise
            except BaseException:
                _tell(end, "deferred", "stopped")
                raise
            _tell(end, RESULTS[outcome], outcome)
            if version is not None and outcome != "already trained":
                with suppress(OSError):
                    before = seen.need.gib if seen.need else 0.0
                    trigger.note(Need(gib=max(dog.peak_gib, FADES * before)))  # what is cached takes little
            return outcome, version

    return told


def short_of_memory(recipe: Recipe, seen: TriggerState, starts: bool = False) -> str:
    """Return why no refresh can start at the moment, "" if there is room; ValueError if its device is not here.

    What this process holds is part of what it needs where it `starts` it, being the refresh itself.
    """
    need = max(recipe.schedule.min_free_memory_gib, seen.need.gib if seen.need else _of_files())
    room = read_memory().room_gib + (own_gib() if starts else 0.0)
    if room < need:
        return f"{max(0.0, room):.1f} GiB to spare, {need:.1f} wanted"
    if not starts or (device := device_of(recipe.refresh_distill())) == "cpu":
        return ""
    require_device(device)
    free, need = torch.cuda.mem_get_info(device)[0] / GIB, _of_files()
    return "" if free >= need else f"{free:.1f} GiB of {device} to spare, {need:.1f} wanted"


def _of_files() -> float:
    settings = load_settings()
    registry, need = open_registry(settings), LIBRARIES_GIB
    for champion, factor in ((registry.champion("target"), TARGET_FACTOR), (registry.champion("draft"), DRAFT_FACTOR)):
        if champion is not None:
            files = cached(champion, settings.cache).rglob("*")
            need += factor * sum(file.stat().st_size for file in files if file.is_file()) / GIB
    return need


def fallen_domains() -> tuple[str, ...]:
    """Return the domains whose acceptance fell and is not back, which the refresh at hand is wanted for, if any."""
    try:
        domains = TriggerStore(load_settings().querylog).state().domains.items()
        return tuple(name for name, state in domains if not isinstance(state, Ok) and state.fall.why == "fell")
    except OSError as error:
        run_logger().warning("the trigger's state can't be read: %s", error)
        return ()


def _tell(end: Callable[[Result, str], None], result: Result, outcome: str) -> None:
    with suppress(OSError):  # then the run is found gone, and the wish stays
        end(result, outcome)
