"""B6: what the query log costs those who ask, how many rows a second it takes, and whether any is lost.

The same prompts are asked with consent "full" and with "none", a few of them each way in turn and the other way first
the next time, so that a machine whose speed drifts favours neither; each is asked once before, so that both find the
prompt's keys and values cached. The rate of the log is measured without an engine beside it, by a process that runs the
service's own recorder (services/log_rate.py).
"""

import sys
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from infra.client import LogLevel
from infra.status import LogCounts
from infra.views.results import Grid, Report, interval
from models.sources import Prompt
from tasks.measure.child import run_program
from tasks.measure.endpoint import Endpoint, dump, forgetful
from tasks.measure.latency import Decoded, compare_blocks, inter_token_spans, percentile
from tasks.measure.outputs import differing, judge_answers, record_reference, sentence
from tasks.measure.run import Run
from tasks.promote import open_champions

TITLE, QUESTION = "B6", "what does logging cost?"
OFF, ON = "off", "on"
CONSENT: dict[str, LogLevel] = {OFF: "none", ON: "full"}
AIM = 0.01
# What is asked one way before it is asked the other: a few seconds.
BLOCK_PER_STREAM = 4
# Rounds with many at once for each with one, because they take so much less time and one slow moment is many requests.
ROUNDS_AT_ONCE = 4
# The log's thread writes after the answer has gone out.
SETTLE_S = 10.0
POLL_S = 0.2

Row = dict[str, Any]


def measure(run: Run, num_prompts: int, num_rounds: int, concurrency: int, num_rows: int) -> Report:
    """Measure latency with logging on and off, then the log alone.

    Args:
        run: the benchmark.
        num_prompts: of each domain.
        num_rounds: how often both sides take turns on all prompts with one stream.
        concurrency: requests in flight in the second half, which has ROUNDS_AT_ONCE times as many rounds.
        num_rows: rows that are offered to the log.

    Raises:
        ValueError: nothing was built, or the recipe has fewer prompts.
        RuntimeError: a request failed.
    """
    run.served()
    prompts = run.prompts("held_out", num_prompts)
    rounds = {1: num_rounds} | ({concurrency: ROUNDS_AT_ONCE * num_rounds} if concurrency > 1 else {})
    cells = {f"{streams}-{number}": (streams, number) for streams, most in rounds.items() for number in range(most)}
    if not all(run.cells.has(name) for name in ("reference", *cells)):
        with Endpoint(forgetful(run.recipe), run.settings) as endpoint:
            endpoint.wait_for_draft(run.served().champion)
            for name, (streams, number) in cells.items():
                run.cells.keep(name, lambda: _round(run, endpoint, prompts, streams, number))  # noqa: B023
            run.cells.keep("reference", lambda: record_reference(run, endpoint, prompts))
    rate = run.cells.keep("rate", lambda: _rate(run, num_rows))
    by_streams: dict[int, list[Row]] = {}
    for name, (streams, _) in cells.items():
        by_streams.setdefault(streams, []).append(run.cells.read(name))
    return _report(run, by_streams, rate)


def _round(run: Run, endpoint: Endpoint, prompts: Sequence[Prompt], streams: int, number: int) -> Row:
    """Ask all prompts three times: unlogged to warm, then both ways; return the pairs of blocks and what was logged."""
    size = BLOCK_PER_STREAM * streams
    pairs: list[dict[str, list[Row]]] = []
    with run.bar(f"{streams} at once, logging off and on in turn", 3 * len(prompts)) as bar:
        before = endpoint.status().log
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
        log = endpoint.status().log
        written, dropped = log.written - before.written, log.dropped - before.dropped
        if written + dropped >= expected or time.monotonic() > until_s:
            return {"expected": expected, "written": written, "dropped": dropped}
        time.sleep(POLL_S)


def _rate(run: Run, num_rows: int) -> Row:
    """Hand the rows that were just logged to a recorder, in a process without an engine beside it."""
    log = run.settings.home / "rate" / "queries.db"
    for file in log.parent.glob("queries.db*"):
        file.unlink()
    target = open_champions.fn().target_files.path
    argv = [sys.executable, "-m", "services.log_rate", "--rows", str(run.settings.querylog), "--target", str(target)]
    argv += ["--log", str(log), "--num-rows", str(num_rows)]
    with run.bar("the log alone", 1) as bar:
        result = run_program(argv, {}, run.settings.home / "logs" / "rate.log", "the log's process")
        bar.advance()
    return result


def _report(run: Run, cells: dict[int, list[Row]], rate: Row) -> Report:
    figures: Row = {"streams": {}, "rate": rate}
    rows, answered = [], []
    for streams, rounds in cells.items():
        pairs = [pair for cell in rounds for pair in cell["pairs"]]
        answers = {side: [row for pair in pairs for row in pair[side]] for side in (OFF, ON)}
        answered += [*answers[OFF], *answers[ON]]
        failed = Counter(row["status"] for of_side in answers.values() for row in of_side if row["status"] != "ok")
        if failed:
            raise RuntimeError(f"requests failed at {streams} at once: {dict(failed)}")
        # Tokens a second without logging over those with it is what logging makes of a token's time.
        latency = compare_blocks([(_requests(pair[OFF]), _requests(pair[ON])) for pair in pairs], run.recipe.seed)
        logged = {name: sum(cell[name] for cell in rounds) for name in ("expected", "written", "dropped")}
        figures["streams"][str(streams)] = {
            "latency_ratio": latency.model_dump(),
            "inter_token_p99_ms": {side: _p99(of_side) for side, of_side in answers.items()},
            **logged,
        }
        p99 = figures["streams"][str(streams)]["inter_token_p99_ms"]
        rows.append(
            [
                f"{streams}",
                f"{sum(len(of_side) for of_side in answers.values())}",
                f"{len(pairs)}",
                interval(latency.model_dump(), 3),
                f"{p99[ON]:.1f} and {p99[OFF]:.1f}",
                f"{logged['written']} of {logged['expected']}",
            ]
        )
    lost = rate["lost"] + sum(one["expected"] - one["written"] - one["dropped"] for one in figures["streams"].values())
    columns = ["at once", "requests", "pairs of blocks", "latency on ÷ off", "p99 ms, on and off", "rows written"]
    alone = Grid(
        "the log without an engine beside it",
        ["rows/s held", "bytes a row", "burst", "written", "dropped and counted", "lost"],
        [
            [
                f"{rate['rows_per_s']:.0f}",
                f"{rate['bytes_per_row']:.0f}",
                *(f"{rate[name]}" for name in ("offered", "written", "dropped", "lost")),
            ]
        ],
    )
    worst = max(one["latency_ratio"]["value"] for one in figures["streams"].values()) - 1
    verdicts = judge_answers(run.cells.read("reference"), answered)
    return Report(
        figures=figures | {"outputs": dict(verdicts)},
        grids=[Grid("seconds of whole requests for each of their tokens", columns, rows), alone],
        verdict=(
            f"{'meets' if worst <= AIM and lost == 0 else 'misses'} the bar (at most {AIM:.0%} latency, nothing lost): "
            f"{worst:+.1%} at worst, {rate['rows_per_s']:.0f} rows/s, {lost} lost."
        ),
        notes=[
            "The ratio has a 95% interval that resamples pairs of blocks and the requests in them.",
            sentence(verdicts),
        ],
        failures=[*([f"{lost} rows are neither written nor counted as dropped"] if lost else []), *differing(verdicts)],
    )


def _requests(answers: Sequence[Row]) -> dict[str, Decoded]:
    """Return prompt to the tokens and seconds of its whole request."""
    return {row["prompt_id"]: Decoded(row["num_tokens"], row["seconds"]) for row in answers}


def _p99(answers: Sequence[Row]) -> float:
    spans = [span for row in answers for span in inter_token_spans(row["sent_s"], row["arrival_ms"])]
    return percentile([1000 * (end - start) for start, end in spans], 99)
