"""What a refresh that trains beside the service costs those who are being answered.

    python -m tests.benchmarks.trainer --prompts 12 --rounds 1

One load goes on from start to end: a while without a refresh, then `redraft refresh` in a process of its own until it
ends, then without one again. The refresh works in another copy of the home, so its draft is never swapped in, and every
round trains the same rows. Its start, which only imports, is left out.
"""

import argparse
import shutil
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from infra.environment import environment_of
from infra.files import files_under
from infra.priority import BUSY_FILE
from infra.processes import Child
from infra.querylog import QueryLog
from infra.registry import open_registry
from infra.settings import Settings, load_settings
from infra.views.results import interval
from models.core.evaluation.latency import (
    Decoded,
    Span,
    compare_percentiles,
    decoded,
    inter_token_spans,
    percentile,
    touching,
)
from models.sources import Prompt
from tasks.measure.compare_traffic import answer_verdicts, record_reference
from tasks.measure.endpoint import Endpoint, dump, forgetful
from tasks.measure.run import Run, copy_served
from tests.benchmarks.scripts import arguments, open_run, require_equal, show

QUIET, TRAINING = "no refresh", "a refresh trains"
OUTCOMES = ("promoted", "undecided", "refused", "nothing", "already")
POLL_S = 0.2
SETTLE_S = 30.0

Row = dict[str, Any]


def measure(run: Run, given: argparse.Namespace) -> Row:
    """Measure with and without a refresh.

    Args:
        run: in its own home.
        given: prompts of each domain, asked over and over; rounds, of a refresh each; concurrency; pause_s, before a
            client asks again; quiet_s, without a refresh before and after each; most_s, after which a refresh is
            stopped.

    Raises:
        ValueError: nothing was built, or the recipe has too few requests to refresh with.
        RuntimeError: a refresh or a request failed, or outputs differ.
    """
    run.served()
    prompts = run.prompts("held_out", given.prompts)
    names = [f"round-{number}" for number in range(given.rounds)]
    if not all(run.cells.has(name) for name in ("filled", "reference", *names)):
        with Endpoint(forgetful(run.recipe), run.settings) as endpoint:
            endpoint.wait_for_draft(run.served().champion)
            run.cells.keep("filled", lambda: _fill(run, endpoint))
            for name in names:
                run.cells.keep(name, lambda: _round(run, endpoint, prompts, given, run.folder / name))  # noqa: B023
            run.cells.keep("reference", lambda: record_reference(run, endpoint, prompts))
    return figures(run, [run.cells.read(name) for name in names])


def _fill(run: Run, endpoint: Endpoint) -> dict[str, int]:
    """Let the service answer and log what a refresh will be trained on."""
    prompts, wanted = run.prompts("requests"), run.recipe.refresh.min_rows
    if len(prompts) < wanted:
        raise ValueError(f"recipe {run.recipe.name} has {len(prompts)} requests, a refresh wants {wanted} rows")
    with run.bar("requests to learn from", len(prompts)) as bar:
        endpoint.ask(prompts, concurrency=run.recipe.generate.concurrency, log="full", on_answer=bar.advance)
    log, until_s = QueryLog(run.settings.querylog), time.monotonic() + SETTLE_S
    while (depth := log.stats().depth) < min(len(prompts), wanted) and time.monotonic() < until_s:
        time.sleep(POLL_S)
    log.close()
    return {"rows": depth}


def _round(run: Run, endpoint: Endpoint, prompts: Sequence[Prompt], given: argparse.Namespace, home: Path) -> Row:
    """Measure one refresh, which works in the folder `home`."""
    training = _training_home(run, home)
    with run.bar("load without, with and without a refresh", 3) as bar:
        with endpoint.load(prompts, given.concurrency, given.pause_s) as answers:
            before = _wait(given.quiet_s)
            bar.advance()
            span, outcome = _refresh(run, training, given.most_s)
            bar.advance()
            after = _wait(given.quiet_s)
        bar.advance()
    trained = open_registry(training).store.recorded("distill")
    shutil.rmtree(home)
    return {
        "windows": {QUIET: [before, after], TRAINING: [span]},
        "outcome": outcome,
        "trainer": trained[0] if trained else None,
        "answers": dump(answers),
    }


def _training_home(run: Run, home: Path) -> Settings:
    """Make a home with the same drafts and the same rows, as if nothing had been refreshed yet."""
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir(parents=True)
    settings = load_settings(environment_of(home))
    copy_served(run.settings, settings)
    (home / BUSY_FILE).symlink_to(run.settings.home / BUSY_FILE)  # the service is that of the other home
    rows, copy = QueryLog(run.settings.querylog), QueryLog(settings.querylog)
    copy.append([row.model_copy(update={"seq": None}) for row in rows.rows(1, sys.maxsize)])
    rows.close()
    copy.close()
    return settings


def _wait(seconds: float) -> Span:
    started_s = time.monotonic()
    time.sleep(seconds)
    return started_s, time.monotonic()


def _refresh(run: Run, training: Settings, most_s: float) -> tuple[Span, str]:
    """Run a refresh; return from when to when it worked, and what it said last or that it was stopped."""
    argv = [*run.redraft, "refresh", "--recipe", run.recipe_name]
    log = training.home / "logs" / "refresh.log"
    with Child.start(argv, environment_of(training.home), log, "the refresh") as child:
        started_s: float | None = None
        launched_s = time.monotonic()
        while (code := child.poll()) is None:
            # Hidden states are the first thing that a refresh computes.
            states = (file for file in files_under(training.artifacts / "work") if "hidden" in file.parts)
            if started_s is None and any(states):
                started_s = time.monotonic()
            if started_s is not None and time.monotonic() > started_s + most_s:
                break
            time.sleep(POLL_S)
        ended_s = time.monotonic()
    if code:
        raise RuntimeError(f"the refresh ended with {code}\n{child.tail()}")
    said = [line for line in child.tail(50).splitlines() if line.startswith(OUTCOMES)]
    outcome = said[-1] if said else f"stopped after {most_s:g} s"
    return (launched_s if started_s is None else started_s, ended_s), outcome


def figures(run: Run, rounds: Sequence[Row]) -> Row:
    """Put the rounds together."""
    groups: dict[str, list[list[float]]] = {QUIET: [], TRAINING: []}
    speeds: dict[str, list[Decoded]] = {QUIET: [], TRAINING: []}
    for cell in rounds:
        for kind, windows in cell["windows"].items():
            for first, last in windows:
                for row in cell["answers"]:
                    spans = inter_token_spans(row["sent_s"], row["arrival_ms"])
                    groups[kind].append(touching(spans, (first, last)))
                    whole = first <= row["sent_s"] and row["sent_s"] + row["seconds"] <= last
                    if whole and (one := decoded(row["arrival_ms"])) is not None:
                        speeds[kind].append(one)
    answers = [row for cell in rounds for row in cell["answers"]]
    if failed := Counter(row["status"] for row in answers if row["status"] != "ok"):
        raise RuntimeError(f"requests failed: {dict(failed)}")
    kinds = {kind: _figures(groups[kind], speeds[kind]) for kind in (QUIET, TRAINING)}
    training, quiet = kinds[TRAINING]["tokens_per_s"], kinds[QUIET]["tokens_per_s"]
    return {
        "kinds": kinds,
        "p99_ratio": compare_percentiles(groups[TRAINING], groups[QUIET], 99, run.recipe.seed).model_dump(),
        "speed_ratio": training / quiet if training and quiet else None,
        "outputs": require_equal(answer_verdicts(run.cells.read("reference"), answers)),
        "outcomes": [cell["outcome"] for cell in rounds],
        "trainers": [cell["trainer"] for cell in rounds if cell["trainer"]],
        "refresh_s": [last - first for cell in rounds for first, last in cell["windows"][TRAINING]],
    }


def _figures(groups: Sequence[Sequence[float]], speeds: Sequence[Decoded]) -> Row:
    values = [ms for group in groups for ms in group]
    tokens, seconds = (sum(one[place] for one in speeds) for place in (0, 1))
    return {
        "num_requests": len(speeds),
        "tokens_per_s": tokens / seconds if speeds else None,
        "inter_token_ms": {"p50": percentile(values, 50), "p99": percentile(values, 99), "max": max(values)},
    }


def main() -> None:
    """Measure and print."""
    parser = arguments("Measure what training beside the service costs.")
    parser.add_argument("--prompts", type=int, default=16, help="of each domain, asked over and over")
    parser.add_argument("--rounds", type=int, default=2, help="of one refresh each")
    parser.add_argument("--concurrency", type=int, default=1, help="clients")
    parser.add_argument("--pause", dest="pause_s", type=float, default=1, help="seconds before a client asks again")
    parser.add_argument("--quiet", dest="quiet_s", type=float, default=120, help="seconds before and after a refresh")
    parser.add_argument("--most", dest="most_s", type=float, default=1200, help="seconds until a refresh is stopped")
    given = parser.parse_args()
    run = open_run("trainer", given)
    found = measure(run, given)
    rows = [
        [
            kind,
            f"{one['num_requests']}",
            "–" if one["tokens_per_s"] is None else f"{one['tokens_per_s']:.1f}",
            *(f"{one['inter_token_ms'][name]:.1f}" for name in ("p50", "p99", "max")),
        ]
        for kind, one in found["kinds"].items()
    ]
    title = f"one constant load; p99 with a refresh ÷ without {interval(found['p99_ratio'])}"
    show({**run.setup, **found}, title, ["", "requests", "tokens/s a stream", "p50 ms", "p99 ms", "max ms"], rows)


if __name__ == "__main__":
    main()
