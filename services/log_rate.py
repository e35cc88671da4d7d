"""How many rows a second recorder and query log take: `python -m services.log_rate --rows LOG --target DIR --log NEW`.

The rows of an existing log are handed over again, each as a finished request with full consent, first as fast as they
are taken, then in one burst that is larger than both queues. Prints one JSON line.
"""

import argparse
import itertools
import json
import sys
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from transformers import AutoTokenizer

from infra.consent import QueryRow
from infra.logwriter import BackgroundWriter
from infra.querylog import QueryLog
from models.engines import Completion
from services.questions import Origin
from services.recorder import Recorder

# Far below what the queues hold, so that nothing is dropped for want of room.
MOST_WAITING = 256
TIMEOUT_S = 60.0
POLL_S = 0.001


def measure(rows: Sequence[QueryRow], tokenizer: Any, log: Path, num_rows: int) -> dict[str, float]:
    """Feed a recorder with a log of its own.

    Args:
        rows: material, with the text's token ids.
        tokenizer: of the target.
        log: the new log's file.
        num_rows: how many rows each of the two runs offers.

    Returns:
        "rows_per_s" held without a loss, and of the burst: "offered", "written", "dropped" and "lost", those that are
        neither; "bytes_per_row" on disk.

    Raises:
        ValueError: no row holds token ids.
        TimeoutError: the rows were not written in time.
    """
    material = [row for row in rows if row.prompt_ids is not None and row.completion_ids is not None]
    if not material:
        raise ValueError(f"none of {len(rows)} rows holds token ids; wanted rows with full consent")
    store = QueryLog(log)
    recorder = Recorder(BackgroundWriter(store), tokenizer, target_version=1)
    try:
        started_s = time.monotonic()
        for number, row in zip(range(num_rows), itertools.cycle(material), strict=False):
            _wait(recorder, number - MOST_WAITING)
            _offer(recorder, row)
        _wait(recorder, num_rows)
        seconds = time.monotonic() - started_s
        held = recorder.counts()
        for _, row in zip(range(num_rows), itertools.cycle(material), strict=False):
            _offer(recorder, row)
        _wait(recorder, 2 * num_rows)
    finally:
        recorder.close(TIMEOUT_S)
    ended, stats = recorder.counts(), store.stats()
    store.close()
    written, dropped = ended.written - held.written, ended.dropped - held.dropped
    return {
        "rows_per_s": num_rows / seconds,
        "dropped_while_held": held.dropped,
        "offered": num_rows,
        "written": written,
        "dropped": dropped,
        "lost": 2 * num_rows - stats.total - ended.dropped,
        "bytes_per_row": stats.bytes / max(stats.total, 1),
    }


def _offer(recorder: Recorder, row: QueryRow) -> None:
    """Hand over one finished request, as the endpoint and the engine do between them."""
    request_id = uuid.uuid4().hex
    recorder.expect(Origin(request_id, row.domain, "full", row.subject))
    completion = Completion(
        request_id=f"chatcmpl-{request_id}",
        prompt_ids=tuple(row.prompt_ids or ()),
        token_ids=tuple(row.completion_ids or ()),
        drafted=tuple(row.drafted or ()),
        accepted=tuple(row.accepted or ()),
        drafted_ids=tuple(tuple(step) for step in row.drafted_ids or ()),
        finish_reason=row.finish_reason,
        first_token_ms=row.first_token_ms or 0.0,
        per_token_ms=row.per_token_ms or 0.0,
        draft_version=str(row.draft_version or ""),
        speculating=row.speculating,
    )
    recorder.finished(completion, SimpleNamespace(n=1, **row.sampling))
    recorder.forget(request_id)


def _wait(recorder: Recorder, num_rows: int) -> None:
    """Wait until so many rows are written or dropped."""
    until_s = time.monotonic() + TIMEOUT_S
    while (counts := recorder.counts()).written + counts.dropped < num_rows:
        if time.monotonic() > until_s:
            raise TimeoutError(f"waited {TIMEOUT_S:g} s for {num_rows} rows, got {counts}")
        time.sleep(POLL_S)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and return the exit code; 2 if there is nothing to measure with."""
    parser = argparse.ArgumentParser(prog="python -m services.log_rate", description="Measure the query log.")
    parser.add_argument("--rows", type=Path, required=True, help="an existing log, whose rows are handed over again")
    parser.add_argument("--target", type=Path, required=True, help="directory with the tokenizer")
    parser.add_argument("--log", type=Path, required=True, help="the new log's file")
    parser.add_argument("--num-rows", type=int, default=4096)
    arguments = parser.parse_args(argv)
    source = QueryLog(arguments.rows)
    try:
        rows = source.rows(1, sys.maxsize)
        result = measure(rows, AutoTokenizer.from_pretrained(arguments.target), arguments.log, arguments.num_rows)
    except ValueError as error:
        print(f"services.log_rate: {error}", file=sys.stderr)
        return 2
    finally:
        source.close()
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
