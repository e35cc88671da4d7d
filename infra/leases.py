"""Leases in a database: what a process holds for as long as it lives.

A holder that is gone is seen at once where process ids can tell. They can't for another host or container, nor for a
process that stands still: there the lease decides. It runs on the database's clock, and a thread renews it.
"""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from sqlalchemy import Connection, Row

from infra.database import Database, DatabaseUnavailable
from infra.machine import process_identity, process_place

LEASE_S, RENEWALS_PER_LEASE = 600.0, 10


def lease(database: Database, connection: Connection, lease_s: float = LEASE_S) -> dict[str, Any]:
    """Return the columns of a lease of this process that begins now."""
    pid, until_ms = os.getpid(), database.now_ms(connection) + int(lease_s * 1000)
    return {"pid": pid, "process": process_identity(pid), "lease_until_ms": until_ms}


def is_held(database: Database, connection: Connection, held: Row[Any]) -> bool:
    """Return whether the process of a lease's columns may still run."""
    if database.now_ms(connection) >= held.lease_until_ms:
        return False
    process: str = held.process
    boot, namespace, _ = process.split(" ")
    own_boot, own_namespace = process_place().split(" ")
    if (boot, namespace) != (own_boot, own_namespace):
        return boot == own_boot or database.is_shared  # else this machine was started again since
    return process_identity(held.pid) == process


@contextmanager
def renewing(renew: Callable[[], bool], lease_s: float = LEASE_S) -> Iterator[None]:
    """Call `renew` from a thread in time, for as long as the context lasts or until it says that the lease is lost."""
    done = threading.Event()

    def run() -> None:
        while not done.wait(lease_s / RENEWALS_PER_LEASE):
            # Busy, full or restarting: the next one comes before the lease ends.
            with suppress(DatabaseUnavailable):
                if not renew():
                    return

    thread = threading.Thread(target=run, name="lease", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
