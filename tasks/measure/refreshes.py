"""What becomes of a served line of drafts under mixed traffic: refresh after refresh, several domains, two API keys.

It goes on from a home with drafts and a log, such as the demonstration's, in a copy of it. Before each refresh both
keys ask fresh requests of every domain, mixed, the first key twice as many as the second. The refresh is the command
that a person would type, and the service takes what it promotes. τ is of the served draft, on held-out prompts that are
never logged, drafted by the head alone.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from infra.client import Answer, Client
from infra.environment import environment_of
from infra.processes import Child
from infra.querylog import QueryLog
from infra.registry import open_registry
from infra.views.figures import draw_refreshes
from infra.views.gate import DATA
from infra.views.results import Grid, Report, interval
from models import catalog
from models.evaluation.acceptance import Trace, summarise
from models.recipe import Traffic
from models.sources import Prompt, dataset
from models.types import PASSED, Estimate, GateReport
from tasks.measure.endpoint import Endpoint, dump
from tasks.measure.run import Run
from tasks.select_data import as_chats, choose_more

TITLE, QUESTION = "refreshes", "does the loop go on learning when traffic is mixed?"
KEYS = ("first-bench-key", "second-bench-key")
PER_CELL = 60  # requests; an interrupted cell is asked again, and what the log has twice is trained on once
POLL_S, SETTLE_S = 0.5, 60.0
FILE_HELD_OUT = 100  # prompts of a file's domain that are never logged

Row = dict[str, Any]


def measure(run: Run, num_refreshes: int, num_requests: int, num_prompts: int, data: str | None) -> Report:
    """Refresh again and again.

    Args:
        run: the benchmark.
        num_refreshes: one after the other.
        num_requests: of each domain before each refresh.
        num_prompts: held-out prompts of each domain that τ is measured on.
        data: a further domain and its prompts, such as "math=prompts.jsonl".

    Raises:
        ValueError: nothing was built or logged, the file of `data` is not there, or a domain has too few prompts.
        RuntimeError: a request or a refresh failed.
    """
    further = dict([file_traffic(data, num_refreshes * num_requests)]) if data else {}
    traffic = {**run.recipe.traffic, **further}
    first = run.served().champion
    log = run.logged()
    held_out, requests = _prompts(run, traffic, num_refreshes * num_requests, num_prompts)
    steps = range(1, num_refreshes + 1)
    if not all(run.cells.has(f"tau-{step}") for step in (0, *steps)):
        settings = run.settings.model_copy(update={"api_keys": KEYS})
        with Endpoint(run.recipe, settings) as endpoint:
            run.cells.keep("tau-0", lambda: _tau(run, endpoint, held_out))
            newest = first
            for step in steps:
                part = {domain: of[(step - 1) * num_requests :][:num_requests] for domain, of in requests.items()}
                _ask(run, endpoint, log, f"requests-{step}", mixed(part))
                newest = run.cells.keep(f"refresh-{step}", lambda: refresh(run, newest))["newest"]  # noqa: B023
                run.cells.keep(f"tau-{step}", lambda: _tau(run, endpoint, held_out))
    log.close()
    taus = [run.cells.read(f"tau-{step}") for step in (0, *steps)]
    return make_report(taus, [run.cells.read(f"refresh-{step}") for step in steps], run.folder / "refreshes.png")


def file_traffic(given: str, num_requests: int, num_held_out: int = FILE_HELD_OUT) -> tuple[str, Traffic]:
    """Return a domain and its prompts out of a file.

    Args:
        given: "domain=file".
        num_requests: that are to be asked.
        num_held_out: that never are; which share of the file either has is drawn, and varies a little.

    Raises:
        ValueError: it is not of that form, or the file is not there.
    """
    domain, _, path = given.partition("=")
    if not domain or not path:
        raise ValueError(f"{given!r} names no domain and file, such as math=prompts.jsonl")
    if not Path(path).is_file():
        raise ValueError(f'domain "{domain}": there is no file {path}; leave it out to go on without that domain')
    source = catalog.parse("sources", {"name": "dataset", "path": path, "domain": domain})
    assert isinstance(source, dataset.Params)
    return domain, Traffic(source=source, num_held_out=num_held_out, num_requests=num_requests)


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


def refresh(run: Run, newest: int) -> Row:
    """Refresh as a person would; what one that was interrupted has registered counts.

    Args:
        run: the benchmark.
        newest: the newest version before.

    Returns:
        Seconds, the newest version now, and what the gate said of it, None if no draft was made.

    Raises:
        RuntimeError: the refresh failed.
    """
    log, started_s = run.settings.home / "logs" / "refresh.log", time.monotonic()
    argv = [*run.redraft, "refresh", "--recipe", run.recipe_name]
    with (
        run.bar("a refresh", 1) as bar,
        Child.start(argv, environment_of(run.settings.home), log, "the refresh") as child,
    ):
        while (code := child.poll()) is None:
            time.sleep(POLL_S)
        bar.advance()
    if code:
        raise RuntimeError(f"the refresh ended with {code}\n{child.tail()}")
    registry = open_registry(run.settings)
    made = registry.versions("draft")[0]
    told = registry.attached(made, DATA) if made.number > newest else None
    return {
        "seconds": round(time.monotonic() - started_s, 1),
        "newest": made.number,
        "gate": None if told is None else GateReport.model_validate_json(told).model_dump(mode="json"),
    }


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


def make_report(states: Sequence[Row], refreshes: Sequence[Row], picture: Path) -> Report:
    """Say what each refresh ended with, and what it left of τ in each domain.

    Args:
        states: what was served before the first refresh and after each.
        refreshes: what they ended with.
        picture: file to draw τ into.
    """
    domains = sorted({row["domain"] for row in states[0]["answers"]})
    taus = {domain: [_tau_of(state, domain) for state in states] for domain in domains}
    told = [["before", "–", "–", "–"], *(_told(step, one) for step, one in enumerate(refreshes, start=1))]
    marks = [f"{name}\ndraft {state['champion']}" for (name, *_), state in zip(told, states, strict=True)]
    rows = [
        [*of_refresh, f"{state['champion']}", *(interval(taus[domain][step].model_dump()) for domain in domains)]
        for step, (of_refresh, state) in enumerate(zip(told, states, strict=True))
    ]
    judged = {step: one["gate"] for step, one in enumerate(refreshes, start=1) if one["gate"] is not None}
    passed = sum(gate["verdict"] == PASSED for gate in judged.values())
    reasons = [f"{step}: {'; '.join(gate['reasons'])}." for step, gate in judged.items() if gate["reasons"]]
    return Report(
        figures={
            "domains": {domain: [tau.model_dump() for tau in of_domain] for domain, of_domain in taus.items()},
            "champions": [state["champion"] for state in states],
            "refreshes": list(refreshes),
        },
        grids=[
            Grid(
                f"τ of the head alone, {len(states[0]['answers']) // len(domains)} held-out prompts a domain",
                ["", "rows", "verdict", "gain, at any look", "served draft", *(f"τ {domain}" for domain in domains)],
                rows,
            )
        ],
        notes=[f"Why refreshes did not pass: {' '.join(reasons)}"] if reasons else [],
        verdict=(
            f"of {len(refreshes)} refreshes {len(judged)} were judged and {passed} passed; "
            f"{len(refreshes) - len(judged)} had too few rows."
        ),
        failures=[
            f"refresh {step} had too few rows" for step, one in enumerate(refreshes, start=1) if one["gate"] is None
        ],
        picture=draw_refreshes(taus, marks, picture),
    )


def _told(step: int, refresh: Row) -> list[str]:
    """Return a refresh's name, rows, verdict and gain."""
    if (gate := refresh["gate"]) is None:
        return [f"refresh {step}", "–", "too few rows", "–"]
    test, (first, last) = gate["test"], gate["test"]["rows"]
    gain = f"{test['gain']['value']:+.3f}, at least {test['gain']['low']:+.3f}"
    return [f"refresh {step}", f"{last - first + 1}", gate["verdict"], f"{gain} ({test['num_conversations']} held out)"]


def _tau_of(state: Row, domain: str) -> Estimate:
    tau = summarise(
        [
            Trace(
                request_id=row["prompt_id"],
                token_ids=tuple(row["token_ids"]),
                drafted=tuple(row["drafted_per_step"]),
                accepted=tuple(row["accepted_per_step"]),
                domain=domain,
            )
            for row in state["answers"]
            if row["domain"] == domain and row["accepted_per_step"]
        ]
    ).tau
    if tau is None:
        raise ValueError(f'domain "{domain}" has no answer with a verification step')
    return tau
