"""How a replica's engine starts: with the best draft that it starts with, and without one rather than not at all.

Memory that runs short, a port that is taken and files that are torn end a start too. So a draft that the engine does
not start with is only passed over, and the next one is tried in the same process; what that says of the draft is in
`services.drafts.DraftHistory.after_start`. When nothing starts, nothing is said of any draft.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

from infra.versions import Version
from services.drafts import DraftHistory, DraftSource, Loaded, choose_boot_draft, label, read_memory, remember

E = TypeVar("E")

log = logging.getLogger(__name__)


async def start_engine(
    start: Callable[[Loaded | None], Awaitable[E]], source: DraftSource, state: Path, counts: Counter[str]
) -> tuple[E, Loaded | None, DraftHistory]:
    """Start with the best draft there is, or with the target alone.

    Counts get `postponed`, and what `choose_boot_draft` counts. `state` is the file of the memory.

    Returns:
        The engine, the draft it was started with, and what is known of drafts now.

    Raises:
        Exception: what `start` raised for the target alone.
    """
    try:
        memory = read_memory(state)
    except ValueError as error:
        counts["errors"] += 1
        log.warning("%s; starting without it", error)
        memory = DraftHistory()
    before = memory
    failed: dict[str, Version] = {}
    while True:
        boot, memory = await asyncio.to_thread(choose_boot_draft, source, memory, counts, failed)
        try:
            engine = await start(boot)
            break
        except Exception:  # the next rung must be reached whatever this one did
            if boot is None:
                raise
            counts["errors"] += 1
            log.exception("the engine did not start with draft %d", boot.version.number)
            failed[label(boot.version)] = boot.version
    memory = memory.after_start([*failed.values()])
    for name, version in failed.items():
        outcome = "refused" if name in memory.refused else "postponed"
        counts[outcome] += 1
        log.warning("draft %d is %s: the engine started without it", version.number, outcome)
    if memory != before:
        await asyncio.to_thread(remember, state, memory, counts)
    return engine, boot, memory
