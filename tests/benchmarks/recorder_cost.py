"""What a recorder costs before somebody else's server: the first token, the time between tokens, tokens/s, and CPU.

    python -m tests.benchmarks.recorder_cost [--streams 1 16 64] [--rounds 5]

A server that answers as vLLM does, at the pace of one, has the first core to itself; recorder and client share the
last. Streams are asked of it directly, through the recorder without consent and with it, in turn, in an order that
moves on from round to round; each stream is a connection of its own. Prints a line for each number of streams, and one
JSON line; ends with 1 where a figure is beyond what is allowed.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import numpy as np
from tqdm import tqdm

from infra.machine import describe_machine
from infra.processes import Child, free_port, wait_until
from infra.settings import Settings
from models.targets.random import byte_tokenizer
from services.record import RecordConfig
from tests.services.played import PlayedServer, Request, Step, chunk, frames, head

NUM_TOKENS, FIRST_S = 128, 0.05
PACE_S = {1: 0.012, 16: 0.03, 64: 0.08}  # between a stream's tokens, by streams
BODY = {"model": "target", "messages": [{"role": "user", "content": "hi"}], "stream": True}
STEPS = [Step([80 + at % 40], {"content": "word "}) for at in range(NUM_TOKENS)]
ALLOWED = {"first_ms": 3.0, "p99_ratio": 1.05, "speed_ratio": 0.98, "cpu_s": 0.3}


class Turn(NamedTuple):
    """One round of one way: a first token's ms and ms between tokens of all streams, tokens/s, and CPU seconds."""

    first_ms: list[float]
    gaps_ms: list[float]
    tokens_per_s: float
    cpu_s: float


def serve(told: Connection, pace_s: float, core: int) -> None:
    """Run the server on a core of its own until the process is ended."""
    os.sched_setaffinity(0, {core})

    async def play(request: Request) -> AsyncIterator[bytes]:
        yield head()
        await asyncio.sleep(FIRST_S)
        for frame in frames(request.body, STEPS):
            yield chunk(frame)
            await asyncio.sleep(pace_s)
        yield chunk(b"")

    async def run() -> None:
        async with PlayedServer(play) as server:
            told.send(server.url)
            await asyncio.Event().wait()

    asyncio.run(run())


async def ask(url: str, headers: str) -> list[float]:
    """Ask for one stream; return when the request was sent and when each token came."""
    address = urlsplit(url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    body = json.dumps(BODY).encode()
    line = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {address.netloc}\r\nContent-Type: application/json\r\n"
    writer.write(f"{line}{headers}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    times = [time.monotonic()]
    while not (came := await reader.readline()).startswith(b"data: [DONE]"):
        if b'"content":"word ' in came:
            times.append(time.monotonic())
    writer.close()
    return times


async def take_turn(url: str, headers: str, streams: int, recorder: int) -> Turn:
    """Ask all streams at once."""
    before, start_s = cpu_s(recorder), time.monotonic()
    answers = await asyncio.gather(*(ask(url, headers) for _ in range(streams)))
    took_s = time.monotonic() - start_s
    await asyncio.sleep(0.5)  # what is written after the answer is the recorder's work, too
    gaps = [1000 * gap for times in answers for gap in np.diff(times[1:])]
    firsts = [1000 * (times[1] - times[0]) for times in answers]
    return Turn(firsts, gaps, streams * NUM_TOKENS / took_s, cpu_s(recorder) - before)


def cpu_s(pid: int) -> float:
    """Return the CPU seconds that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def measure(home: Path, streams: int, rounds: int, cores: list[int]) -> dict[str, Any]:
    """Return the figures of one number of streams; this process and the recorder have the last core."""
    os.sched_setaffinity(0, cores[-1:])
    spawn = multiprocessing.get_context("spawn")
    told, tell = spawn.Pipe(duplex=False)
    server = spawn.Process(target=serve, args=(tell, PACE_S.get(streams, 0.03), cores[0]), daemon=True)
    server.start()
    url, port = told.recv(), free_port()
    (target := home / "target").mkdir(exist_ok=True)
    byte_tokenizer().save_pretrained(target)
    config = RecordConfig(
        server=url, models=("target",), port=port, target_dir=target, target_version=1, settings=Settings(home=home)
    )
    (home / "record.json").write_text(config.model_dump_json())
    argv = [sys.executable, "-m", "services.record", "--config", str(home / "record.json")]
    recorded = f"http://127.0.0.1:{port}"
    ways = {"direct": (url, ""), "passed": (recorded, ""), "recorded": (recorded, "X-Redraft-Log: full\r\n")}
    turns: dict[str, list[Turn]] = {way: [] for way in ways}
    with Child.start(argv, None, home / "record.log", "the recorder") as child:
        wait_until(lambda: listens(port), 60, child, "the recorder")
        (pid,) = children(child.pid)
        for number in tqdm(range(rounds + 1), f"{streams} streams", mininterval=5):
            names = list(ways)
            for way in names[number % 3 :] + names[: number % 3]:
                turn = await take_turn(*ways[way], streams, pid)
                if number:  # the first round warms up
                    turns[way].append(turn)
    server.terminate()
    row: dict[str, Any] = {"streams": streams}
    for way in ("passed", "recorded"):
        pairs = list(zip(turns[way], turns["direct"], strict=True))
        row[way] = {
            "first_ms": round(median(median(one.first_ms) - median(other.first_ms) for one, other in pairs), 2),
            "p99_ratio": round(median(p99(one) / p99(other) for one, other in pairs), 3),
            "speed_ratio": round(median(one.tokens_per_s / other.tokens_per_s for one, other in pairs), 3),
            "cpu_s": round(1000 * sum(one.cpu_s for one, _ in pairs) / (len(pairs) * streams * NUM_TOKENS), 3),
        }
    return row


def p99(turn: Turn) -> float:
    """Return the 99th percentile of the ms between tokens."""
    return float(np.percentile(turn.gaps_ms, 99))


def listens(port: int) -> bool:
    """Whether somebody listens on a port of this machine."""
    lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
    return any(line.split()[1].endswith(f":{port:04X}") and line.split()[3] == "0A" for line in lines)


def children(pid: int) -> list[int]:
    """Return the children of a process."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def main() -> int:
    """Measure; return 1 where more is lost than allowed."""
    parser = argparse.ArgumentParser(description="What a recorder costs before somebody else's server.")
    parser.add_argument("--streams", type=int, nargs="+", default=[*PACE_S])
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    rows = []
    for streams in given.streams:
        with tempfile.TemporaryDirectory() as folder:
            rows.append(asyncio.run(measure(Path(folder), streams, given.rounds, cores)))
        print(json.dumps(rows[-1]), flush=True)
    worst = {name: [one[way][name] for one in rows for way in ("passed", "recorded")] for name in ALLOWED}
    beyond = [name for name, found in worst.items() if not within(name, found)]
    os.sched_setaffinity(0, cores)
    print(json.dumps({**describe_machine(), "rows": rows, "allowed": ALLOWED, "beyond": beyond}))
    return int(bool(beyond))


def within(name: str, found: list[float]) -> bool:
    """Whether all of a figure's values are allowed."""
    return min(found) >= ALLOWED[name] if name == "speed_ratio" else max(found) <= ALLOWED[name]


if __name__ == "__main__":
    sys.exit(main())
