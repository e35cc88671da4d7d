"""How many rows a second the query log takes from two writers, on SQLite and on Postgres, and whether any is lost.

    python -m tests.benchmarks.log_rate --rows 20000 --repeats 3

A row is as a service writes it: a prompt of 300 tokens, an answer of 200 with its text, and what was drafted and
accepted in each step. Each writer is a process with the writer that a service has; it offers its rows as fast as that
takes them. Databases take turns, each with a log that is empty at first, and both write to the disk before they commit.
The clock of a run starts when all writers are ready. Every row must be there at the end.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from infra.consent import QueryRow
from infra.querylog import BackgroundWriter, QueryLog
from tests.benchmarks.scripts import show
from tests.infra.rows import address, environment
from tests.postgres import PostgresServer

PROMPT, ANSWER, K = 300, 200, 3
WAITING = 768  # of the 1,024 that the writer's queue holds
SETTLED_S = 60.0


def made_row(name: str) -> QueryRow:
    steps = [K] * (ANSWER // 2)  # two tokens a step
    return QueryRow(
        id=name,
        time_ms=time.time_ns() // 1_000_000,
        subject="5" * 64,
        key="6" * 64,
        domain="chat",
        consent="full",
        scrubber_revision=1,
        target_version=1,
        draft_version=1,
        server="host:8000",
        prompt="and what is it " * (PROMPT // 4),
        completion="it is a word " * (ANSWER // 4),
        prompt_ids=[1000 + number for number in range(PROMPT)],
        completion_ids=[2000 + number for number in range(ANSWER)],
        drafted=steps,
        accepted=[1] * len(steps),
        drafted_ids=[[3000, 3001, 3002]] * len(steps),
        matches=[0] * len(steps),
        sampling={"temperature": 0.7, "top_p": 0.9},
        finish_reason="stop",
        first_token_ms=31.5,
        per_token_ms=14.25,
        speculating=True,
    )


def write(log: QueryLog, writer: str, num_rows: int) -> None:
    """Offer rows once the other side says so, and print what became of them."""
    rows = [made_row(f"{writer}-{number}") for number in range(num_rows)]
    background = BackgroundWriter(log)
    print("ready", flush=True)
    sys.stdin.readline()
    for number, row in enumerate(rows):
        while number - background.written - background.dropped > WAITING:
            time.sleep(0.001)
        background.offer(row)
    background.close(SETTLED_S)
    print(json.dumps({"written": background.written, "dropped": background.dropped}), flush=True)


def measure(store: Path | str, num_writers: int, num_rows: int) -> float:
    """Return the rows a second of some writers together; RuntimeError if a row was lost."""
    log = QueryLog(store)
    log.stats()
    argv, pipe = [sys.executable, "-m", __spec__.name, "--write", str(store), "--rows", str(num_rows)], subprocess.PIPE
    with ExitStack() as stack:
        writers = [
            stack.enter_context(
                subprocess.Popen([*argv, "--name", name], stdin=pipe, stdout=pipe, text=True, env=environment())
            )
            for name in "abcdefgh"[:num_writers]
        ]
        for one in writers:
            assert one.stdout is not None and one.stdout.readline() == "ready\n"
        began_s = time.monotonic()
        for one in writers:
            assert one.stdin is not None
            one.stdin.write("go\n")
            one.stdin.flush()
        told = [json.loads(one.stdout.readline()) for one in writers if one.stdout is not None]
        seconds = time.monotonic() - began_s
    stats = log.stats()
    log.close()
    total = num_writers * num_rows
    if (stats.total, stats.dropped, sum(one["written"] for one in told)) != (total, 0, total):
        raise RuntimeError(f"offered {total} rows, {stats.total} are there and {stats.dropped} counted as lost: {told}")
    return total / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure how many rows a second the query log takes.")
    parser.add_argument("--rows", type=int, default=20_000, help="of each writer")
    parser.add_argument("--repeats", type=int, default=3, help="of each database and number of writers")
    parser.add_argument("--write", help=argparse.SUPPRESS)
    parser.add_argument("--name", default="a", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.write:
        write(QueryLog(address(given.write)), given.name, given.rows)
        return
    rates: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder, PostgresServer(durable=True) as server:
        for repeat in range(given.repeats):
            for num_writers in (1, 2):
                for name, store in {
                    "SQLite": Path(folder) / f"{repeat}-{num_writers}.db",
                    "Postgres": f"{server.address}&schema=rate_{repeat}_{num_writers}",
                }.items():
                    rates.setdefault(f"{name}, {num_writers}", []).append(measure(store, num_writers, given.rows))
    figures = {name: {"median": statistics.median(of), "all": of} for name, of in rates.items()}
    rows = [[name, f"{statistics.median(of):,.0f}", f"{min(of):,.0f} to {max(of):,.0f}"] for name, of in rates.items()]
    setup = {"rows": given.rows, "repeats": given.repeats, "body_bytes": len(made_row("a").body())}
    show({**setup, "rows_per_s": figures}, "rows a second", ["database, writers", "median", "of the repeats"], rows)


if __name__ == "__main__":
    main()
