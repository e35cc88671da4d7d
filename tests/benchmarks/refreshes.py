"""What becomes of a served line of drafts under mixed traffic: refresh after refresh, several domains, two API keys.

    python -m tests.benchmarks.refreshes --data math=gsm8k.jsonl

It goes on from a home with drafts and a log, such as the demonstration's, in a copy of it. Before each refresh both
keys ask fresh requests of every domain, mixed, the first key twice as many as the second. The refresh is the command
that a person would type, and the service takes what it promotes. τ is of the served draft, on held-out prompts that are
never logged, drafted by the head alone.
"""

import argparse
import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from infra.client import Answer, Client
from infra.querylog import QueryLog
from infra.registry import open_registry
from infra.views.results import interval
from models.core.evaluation.acceptance import Estimate, summarise
from models.recipe import Traffic
from models.sources import Prompt
from tasks.measure.compare_traffic import traces_of
from tasks.measure.drift import file_traffic, refresh
from tasks.measure.endpoint import Endpoint, dump
from tasks.measure.run import Run
from tasks.select_data import as_chats, choose_more
from tests.benchmarks.scripts import arguments, open_run, show

KEYS = ("first-bench-key", "second-bench-key")
PER_CELL = 60  # requests; an interrupted cell is asked again, and what the log has twice is trained on once
POLL_S, SETTLE_S = 0.5, 60.0

Row = dict[str, Any]


def measure(run: Run, given: argparse.Namespace) -> Row:
    """Refresh again and again.

    Args:
        run: in its own home.
        given: refreshes; requests of each domain before each; held-out prompts of each domain that τ is measured on;
            data, a further domain and its prompts, such as "math=prompts.jsonl".

    Raises:
        ValueError: nothing was built or logged, the file of `data` is not there, or a domain has too few prompts.
        RuntimeError: a request or a refresh failed, or found too few rows.
    """
    num_requests, all_requests = given.requests, given.refreshes * given.requests
    further = dict([file_traffic(given.data, all_requests, num_held_out=100)]) if given.data else {}
    traffic = {**run.recipe.traffic, **further}
    newest = run.served().champion
    log = run.logged()
    held_out, requests = _prompts(run, traffic, all_requests, given.prompts)
    steps = range(1, given.refreshes + 1)
    if not all(run.cells.has(f"tau-{step}") for step in (0, *steps)):
        settings = run.settings.model_copy(update={"api_keys": KEYS})
        with Endpoint(run.recipe, settings) as endpoint:
            run.cells.keep("tau-0", lambda: _tau(run, endpoint, held_out))
            for step in steps:
                part = {domain: of[(step - 1) * num_requests :][:num_requests] for domain, of in requests.items()}
                _ask(run, endpoint, log, f"requests-{step}", mixed(part))
                newest = run.cells.keep(f"refresh-{step}", lambda: refresh(run, newest))["newest"]  # noqa: B023
                run.cells.keep(f"tau-{step}", lambda: _tau(run, endpoint, held_out))
    log.close()
    states = [run.cells.read(f"tau-{step}") for step in (0, *steps)]
    refreshes = [run.cells.read(f"refresh-{step}") for step in steps]
    if idle := [step for step, one in zip(steps, refreshes, strict=True) if one["gate"] is None]:
        raise RuntimeError(f"refresh {idle[0]} had too few rows")
    return {
        "domains": {domain: [tau_of(state, domain).model_dump() for state in states] for domain in sorted(traffic)},
        "champions": [state["champion"] for state in states],
        "refreshes": refreshes,
    }


def mixed(parts: Mapping[str, Sequence[Prompt]]) -> list[tuple[str, Prompt]]:
    """Return (key, request), the domains in turn; of three rounds of all domains the first key asks two."""
    turns = zip(*parts.values(), strict=True)
    return [(KEYS[place % 3 // 2], prompt) for place, turn in enumerate(turns) for prompt in turn]


def _prompts(
    run: Run, traffic: Mapping[str, Traffic], num_requests: int, num_prompts: int
) -> tuple[list[Prompt], dict[str, list[Prompt]]]:
    """Return held-out prompts, and for each domain requests that the recipe's demonstration did not ask."""
    held_out, requests, seed = [], {}, run.recipe.seed
    for domain, table in traffic.items():
        held_out += choose_more(domain, table, seed, "held_out", num_prompts)
        asked = table.num_requests if domain in run.recipe.traffic else 0
        requests[domain] = choose_more(domain, table, seed, "requests", asked + num_requests)[asked:]
    return held_out, requests


def _ask(run: Run, endpoint: Endpoint, log: QueryLog, name: str, asked: Sequence[tuple[str, Prompt]]) -> None:
    """Let both keys ask at the same time, and wait until all of it is logged."""
    cells = [f"{name}-{start // PER_CELL}" for start in range(0, len(asked), PER_CELL)]
    for number, cell in enumerate(cells):
        batch = asked[number * PER_CELL :][:PER_CELL]
        if not run.cells.has(cell):
            with run.bar(f"{cell} of {len(cells)}", len(batch)) as bar:
                before = log.stats().depth
                run.cells.keep(cell, lambda: _send(run, endpoint, batch, bar.advance))  # noqa: B023
                until_s = time.monotonic() + SETTLE_S
                while log.stats().depth < before + len(batch) and time.monotonic() < until_s:
                    time.sleep(POLL_S)


def _send(
    run: Run, endpoint: Endpoint, asked: Sequence[tuple[str, Prompt]], on_answer: Callable[[Answer], None]
) -> dict[str, int]:
    most = run.recipe.generate

    async def send() -> list[list[Answer]]:
        batches = [(key, [prompt for asker, prompt in asked if asker == key]) for key in KEYS]
        return await asyncio.gather(
            *(
                Client(endpoint.url, key, operates=False).send(
                    as_chats(prompts, run.recipe.traffic),
                    concurrency=max(1, most.concurrency // len(KEYS)),
                    max_tokens=most.max_tokens,
                    on_answer=on_answer,
                )
                for key, prompts in batches
            )
        )

    answers = [answer for of_key in asyncio.run(send()) for answer in of_key]
    return _all_answered(answers)


def _all_answered(answers: Sequence[Answer]) -> dict[str, int]:
    found = Counter(answer.status for answer in answers)
    if set(found) - {"ok"}:
        raise RuntimeError(f"requests failed: {dict(found)}")
    return dict(found)


def _tau(run: Run, endpoint: Endpoint, held_out: Sequence[Prompt]) -> Row:
    """Ask the held-out prompts as soon as the service drafts with the champion."""
    champion = open_registry(run.settings).champion("draft")
    assert champion is not None
    endpoint.wait_for_draft(champion.number)
    with run.bar(f"τ of draft {champion.number}", len(held_out)) as bar:
        answers = endpoint.ask(
            held_out, concurrency=run.recipe.generate.concurrency, speculation="head", on_answer=bar.advance
        )
    _all_answered(answers)
    return {"champion": champion.number, "answers": dump(answers)}


def tau_of(state: Row, domain: str) -> Estimate:
    """Return τ of the head alone in a domain; ValueError if no answer there has a verification step."""
    tau = summarise(traces_of([row for row in state["answers"] if row["accepted_per_step"]], domain)).tau
    if tau is None:
        raise ValueError(f'domain "{domain}" has no answer with a verification step')
    return tau


def table(found: Mapping[str, Any]) -> list[list[str]]:
    """Return a row for the start and for each refresh: rows, verdict, gain, what was served then, and τ by domain."""
    told = [["before", "–", "–", "–"]]
    for step, one in enumerate(found["refreshes"], start=1):
        test, (first, last) = one["gate"]["test"], one["gate"]["test"]["rows"]
        gain = f"{test['gain']['value']:+.3f}, at least {test['gain']['low']:+.3f}"
        told.append([f"refresh {step}", f"{last - first + 1}", one["gate"]["verdict"], gain])
    return [
        [*of_step, f"{number}", *(interval(taus[step]) for taus in found["domains"].values())]
        for step, (of_step, number) in enumerate(zip(told, found["champions"], strict=True))
    ]


def main() -> None:
    """Measure and print."""
    parser = arguments("Refresh again and again under mixed traffic.")
    parser.add_argument("--refreshes", type=int, default=3, help="one after the other")
    parser.add_argument("--requests", type=int, default=140, help="of each domain before each refresh")
    parser.add_argument("--prompts", type=int, default=60, help="held-out prompts of each domain")
    parser.add_argument(
        "--data", metavar="DOMAIN=FILE", help="a further domain's prompts, as source dataset reads them"
    )
    given = parser.parse_args()
    run = open_run("refreshes", given)
    found = measure(run, given)
    columns = ["", "rows", "verdict", "gain, at any look", "served draft", *(f"τ {name}" for name in found["domains"])]
    show({**run.setup, **found}, "τ of the head alone on held-out prompts", columns, table(found))


if __name__ == "__main__":
    main()
