"""What the query log costs those who ask, how many rows a second it takes, and whether any is lost.

    python -m tests.benchmarks.query_log --prompts 100 --rounds 1

The same prompts are asked with consent "full" and with "none", a few of them each way in turn and the other way first
the next time, so that a machine whose speed drifts favours neither; each is asked once before, so that both find the
prompt's keys and values cached. Seconds are of whole requests. The rate of the log is measured when the service has
ended: a recorder as the service has is handed the rows that were just logged, first as fast as they are taken, then in
one burst that is larger than both queues.
"""

import argparse
import itertools
import sys
import time
import uuid
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from transformers import AutoTokenizer

from infra.client import LogLevel
from infra.consent import QueryRow
from infra.querylog import BackgroundWriter, QueryLog
from infra.status import LogCounts
from infra.views.results import interval
from models.chats import ChatEncoder
from models.core.evaluation.latency import Decoded, compare_blocks, inter_token_spans, percentile
from models.engines import Completion
from models.sources import Prompt
from services.questions import Origin
from services.recorder import Recorder
from tasks.measure.compare_traffic import answer_verdicts, record_reference
from tasks.measure.endpoint import Endpoint, dump, forgetful
from tasks.measure.run import Run
from tasks.promote import open_champions
from tests.benchmarks.scripts import arguments, open_run, require_equal, show

OFF, ON = "off", "on"
CONSENT: dict[str, LogLevel] = {OFF: "none", ON: "full"}
# What is asked one way before it is asked the other: a few seconds.
BLOCK_PER_STREAM = 4
# Rounds with many at once for each with one, because they take so much less time and one slow moment is many requests.
ROUNDS_AT_ONCE = 4
# The log's thread writes after the answer has gone out.
SETTLE_S, POLL_S = 10.0, 0.2
# Far below what the queues hold, so that nothing is dropped for want of room.
MOST_WAITING = 256
WRITTEN_TIMEOUT_S, WRITTEN_POLL_S = 60.0, 0.001

Row = dict[str, Any]


def measure(run: Run, given: argparse.Namespace) -> Row:
    """Measure latency with logging on and off, then the log alone; RuntimeError if a request failed.

    Args:
        run: in its own home.
        given: prompts of each domain, rounds of both ways with one stream, requests in flight in the second half, which
            has ROUNDS_AT_ONCE times as many rounds, and rows that are offered to the log.
    """
    run.served()
    prompts = run.prompts("held_out", given.prompts)
    rounds = {1: given.rounds} | ({given.concurrency: ROUNDS_AT_ONCE * given.rounds} if given.concurrency > 1 else {})
    cells = {f"{streams}-{number}": (streams, number) for streams, most in rounds.items() for number in range(most)}
    if not all(run.cells.has(name) for name in ("reference", *cells)):
        with Endpoint(forgetful(run.recipe), run.settings) as endpoint:
            endpoint.wait_for_draft(run.served().champion)
            for name, (streams, number) in cells.items():
                run.cells.keep(name, lambda: _round(run, endpoint, prompts, streams, number))  # noqa: B023
            run.cells.keep("reference", lambda: record_reference(run, endpoint, prompts))
    by_streams: dict[int, list[Row]] = {}
    for name, (streams, _) in cells.items():
        by_streams.setdefault(streams, []).append(run.cells.read(name))
    return {
        "streams": {str(streams): _figures(run, of) for streams, of in by_streams.items()},
        "rate": run.cells.keep("rate", lambda: _rate(run, given.rows)),
    }


def _round(run: Run, endpoint: Endpoint, prompts: Sequence[Prompt], streams: int, number: int) -> Row:
    """Ask all prompts three times: unlogged to warm, then both ways; return the pairs of blocks and what was logged."""
    size = BLOCK_PER_STREAM * streams
    pairs: list[dict[str, list[Row]]] = []
    with run.bar(f"{streams} at once, logging off and on in turn", 3 * len(prompts)) as bar:
        before = endpoint.client.status().log
        for turn, start in enumerate(range(0, len(prompts), size), start=number):
            block = prompts[start : start + size]
            endpoint.ask(block, concurrency=streams, on_answer=bar.advance)
            pairs.append({})
            for side in (OFF, ON) if turn % 2 == 0 else (ON, OFF):
                pairs[-1][side] = dump(
                    endpoint.ask(block, concurrency=streams, log=CONSENT[side], on_answer=bar.advance)
                )
    return {"pairs": pairs, **_logged(endpoint, before, len(prompts))}


def _logged(endpoint: Endpoint, before: LogCounts, expected: int) -> dict[str, int]:
    until_s = time.monotonic() + SETTLE_S
    while True:
        log = endpoint.client.status().log
        written, dropped = log.written - before.written, log.dropped - before.dropped
        if written + dropped >= expected or time.monotonic() > until_s:
            return {"expected": expected, "written": written, "dropped": dropped}
        time.sleep(POLL_S)


def _figures(run: Run, rounds: Sequence[Row]) -> Row:
    """Return the figures of one number of streams."""
    pairs = [pair for cell in rounds for pair in cell["pairs"]]
    answers = {side: [row for pair in pairs for row in pair[side]] for side in (OFF, ON)}
    both = [*answers[OFF], *answers[ON]]
    if failed := Counter(row["status"] for row in both if row["status"] != "ok"):
        raise RuntimeError(f"requests failed: {dict(failed)}")
    # Tokens a second without logging over those with it is what logging makes of a token's time.
    latency = compare_blocks([(_requests(pair[OFF]), _requests(pair[ON])) for pair in pairs], run.recipe.seed)
    return {
        "outputs": require_equal(answer_verdicts(run.cells.read("reference"), both)),
        "latency_ratio": latency.model_dump(),
        "inter_token_p99_ms": {side: _p99(of_side) for side, of_side in answers.items()},
        **{name: sum(cell[name] for cell in rounds) for name in ("expected", "written", "dropped")},
    }


def _requests(answers: Sequence[Row]) -> dict[str, Decoded]:
    """Return prompt to the tokens and seconds of its whole request."""
    return {row["prompt_id"]: Decoded(row["num_tokens"], row["seconds"]) for row in answers}


def _p99(answers: Sequence[Row]) -> float:
    spans = [span for row in answers for span in inter_token_spans(row["sent_s"], row["arrival_ms"])]
    return percentile([1000 * (end - start) for start, end in spans], 99)


def _rate(run: Run, num_rows: int) -> dict[str, float]:
    """Hand what was logged to a recorder with a log of its own."""
    log = run.settings.home / "rate" / "queries.db"
    for file in log.parent.glob("queries.db*"):
        file.unlink()
    source = QueryLog(run.settings.querylog)
    rows = source.rows(1, sys.maxsize)
    source.close()
    tokenizer = AutoTokenizer.from_pretrained(open_champions.fn().target_files.path)
    with run.bar("the log alone", 1) as bar:
        found = measure_rate(rows, tokenizer, log, num_rows)
        bar.advance()
    return found


def measure_rate(rows: Sequence[QueryRow], tokenizer: Any, log: Path, num_rows: int) -> dict[str, float]:
    """Feed a recorder.

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
    log.parent.mkdir(parents=True, exist_ok=True)
    store = QueryLog(log)
    recorder = Recorder(BackgroundWriter(store), ChatEncoder.of(tokenizer).rewrite, target_version=1)
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
        recorder.close(WRITTEN_TIMEOUT_S)
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
    until_s = time.monotonic() + WRITTEN_TIMEOUT_S
    while (counts := recorder.counts()).written + counts.dropped < num_rows:
        if time.monotonic() > until_s:
            raise TimeoutError(f"waited {WRITTEN_TIMEOUT_S:g} s for {num_rows} rows, got {counts}")
        time.sleep(WRITTEN_POLL_S)


def main() -> None:
    """Measure and print."""
    parser = arguments("Measure what logging costs.")
    parser.add_argument("--prompts", type=int, default=50, help="held-out prompts of each domain")
    parser.add_argument("--rounds", type=int, default=2, help="of both ways, with one stream")
    parser.add_argument("--concurrency", type=int, default=8, help="requests in flight in the second half")
    parser.add_argument("--rows", type=int, default=4096, help="offered when the log alone is measured")
    given = parser.parse_args()
    run = open_run("query_log", given)
    found = measure(run, given)
    rows = [
        [
            streams,
            interval(one["latency_ratio"], 3),
            *(f"{one['inter_token_p99_ms'][side]:.1f}" for side in (ON, OFF)),
            f"{one['written']} of {one['expected']}",
        ]
        for streams, one in found["streams"].items()
    ]
    columns = ["at once", "seconds a token, on ÷ off", "p99 on, ms", "p99 off, ms", "rows written"]
    show({**run.setup, **found}, "logging on and off", columns, rows)


if __name__ == "__main__":
    main()
