"""The query log's writer beside a service: takes rows at once and writes them later, or counts them as dropped."""

import logging
import queue
import threading
import time
from contextlib import suppress

from infra.consent import QueryRow, require_loggable
from infra.database import DatabaseTorn
from infra.querylog import QueryLog

RETRY_S = 0.5
logger = logging.getLogger(__name__)


class BackgroundWriter:
    """Takes rows from request handlers without ever making them wait, and writes them in a thread.

    A batch waits while the database is down, busy or full, and the queue with it. A row that finds the queue full is
    dropped and counted, and so is a batch that a torn log, or one of another schema, refuses; the count is written to
    the log with the next batch that succeeds.
    """

    def __init__(self, log: QueryLog, capacity: int = 1024, batch: int = 256) -> None:
        self.written = 0
        self.dropped = 0
        self.last_error: str | None = None
        self._log = log
        self._batch = batch
        self._queue: queue.Queue[QueryRow | None] = queue.Queue(capacity)  # None wakes the thread at the end
        self._unrecorded = 0  # dropped, and not yet counted in the log
        self._failing = False
        self._lock = threading.Lock()
        self._closing = False
        self._until_s = 0.0  # when a writer that closes gives up
        self._thread = threading.Thread(target=self._drain, name="querylog-writer", daemon=True)
        self._thread.start()

    def offer(self, row: QueryRow) -> bool:
        """Queue a row, or drop and count it; return whether it is queued; ValueError as `require_loggable`."""
        require_loggable(row)
        with self._lock:
            with suppress(queue.Full):
                if not self._closing:
                    self._queue.put_nowait(row)
                    return True
            self._drop(1)
        return False

    def close(self, timeout_s: float = 5.0) -> None:
        """Write what is queued and end the thread; what is not written after `timeout_s` seconds counts as dropped."""
        with self._lock, suppress(queue.Full):  # then it is awake
            self._until_s = time.monotonic() + timeout_s
            self._closing = True
            self._queue.put_nowait(None)
        self._thread.join(timeout_s)
        with self._lock:
            self._drop(len(self._take(self._queue.qsize())))

    def _drain(self) -> None:
        while not (self._closing and self._queue.empty()):
            first = self._queue.get()
            self._write([*([] if first is None else [first]), *self._take(self._batch - 1)])
        self._write([])
        self._log.close()

    def _write(self, rows: list[QueryRow]) -> None:
        """Write a batch, as often as it takes."""
        while True:
            with self._lock:
                unrecorded = self._unrecorded
            if not rows and not unrecorded:
                return
            try:
                self._log.append(rows, dropped=unrecorded)
            except (OSError, ValueError) as error:  # ValueError: the log is of another schema
                if not self._failing:  # once, and not at every try
                    logger.warning("the query log takes no rows: %s", error)
                self._log.close()  # the file may be replaced meanwhile, and is opened anew
                with self._lock:
                    self._failing, self.last_error = True, str(error)
                is_late = self._closing and time.monotonic() + RETRY_S > self._until_s
                if is_late or isinstance(error, ValueError | DatabaseTorn):
                    with self._lock:
                        self._drop(len(rows))
                    return
                time.sleep(RETRY_S)
            else:
                with self._lock:
                    self._failing = False
                    self.written += len(rows)
                    self._unrecorded -= unrecorded
                return

    def _take(self, limit: int) -> list[QueryRow]:
        rows: list[QueryRow] = []
        with suppress(queue.Empty):
            while len(rows) < limit:
                if (row := self._queue.get_nowait()) is not None:
                    rows.append(row)
        return rows

    def _drop(self, num_rows: int) -> None:  # with the lock held
        self.dropped += num_rows
        self._unrecorded += num_rows
