"""What a swap costs those who are being answered, against what a restart costs.

A constant number of clients asks without a pause while the champion alternates between two drafts. Near a swap is
within a second of it, on both sides, plus what can't be told from outside: the swap's own time and the time between two
looks at the service. The windows without a swap are as long, and end before the next draft is promoted. What probation
costs, the golden prompts that are answered beside the traffic, is shown apart.
"""

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from infra.client import Answer
from infra.registry import Registry, open_registry
from infra.status import ServiceStatus
from infra.views.figures import draw_latency
from infra.views.results import Grid, Report, interval, spread
from models.core.evaluation.latency import (
    Span,
    compare_percentiles,
    inter_token_spans,
    longest_silence,
    percentile,
    touching,
)
from models.core.evaluation.latency import spread as spread_of
from tasks.measure.compare_traffic import answer_verdicts, differing, record_reference, sentence
from tasks.measure.endpoint import Endpoint, dump, forgetful
from tasks.measure.run import Run

QUESTION = "what does a swap cost?"
NEAR_S = 1.0
POLL_S = 0.05
SETTLE_S = 3.0
# Between a draft's last check and the next promotion: room for one window without a swap.
QUIET_S = 2 * NEAR_S + 1.5
SWAP_TIMEOUT_S = 180.0

Row = dict[str, Any]
Load = Callable[[], AbstractContextManager[list[Answer]]]


def measure(run: Run, num_prompts: int, num_swaps: int, per_cell: int, concurrency: int) -> Report:
    """Swap under load, `per_cell` swaps kept together, then restart under load; prompts are asked over and over.

    ValueError if nothing was built, or the recipe has fewer prompts; RuntimeError if the service did not take a draft.
    """
    served = run.served()
    prompts = run.prompts("held_out", num_prompts)
    sizes = {f"swaps-{first}": min(per_cell, num_swaps - first) for first in range(0, num_swaps, per_cell)}
    same_files = served.champion == 1
    if not all(run.cells.has(name) for name in ("reference", *sizes, "restart")):
        registry = open_registry(run.settings)
        versions = _same_twice(run, registry) if same_files else (served.champion - 1, served.champion)
        registry.promote("draft", versions[1])
        with Endpoint(forgetful(run.recipe), run.settings) as endpoint:
            endpoint.wait_for_draft(versions[1])
            load = partial(endpoint.load, prompts, concurrency)
            for name, size in sizes.items():
                run.cells.keep(name, lambda: _swaps(run, endpoint, load, versions, size))  # noqa: B023 - called at once
            run.cells.keep("reference", lambda: record_reference(run, endpoint, prompts))
            run.cells.keep("restart", lambda: _restart(run, endpoint, load))
    swaps = [run.cells.read(name) for name in sizes]
    return _report(run, swaps, run.cells.read("restart"), run.cells.read("reference"), same_files)


def _same_twice(run: Run, registry: Registry) -> tuple[int, int]:
    """Return two versions with one draft's files; the second is made if no run before this one made it."""
    newest = registry.versions("draft")[0]
    if newest.number > 1:
        return 1, newest.number
    files = registry.download(newest, run.settings.cache)
    return 1, registry.register("draft", files, newest.lineage.to_tags()).number


def _swaps(run: Run, endpoint: Endpoint, load: Load, versions: tuple[int, int], num_swaps: int) -> Row:
    swaps, registry = [], open_registry(run.settings)
    with run.bar("swaps under load", num_swaps) as bar, load() as answers:
        _watch(endpoint, SETTLE_S)
        for _ in range(num_swaps):
            swaps.append(_swap(endpoint, registry, versions))
            bar.advance()
    return {"swaps": swaps, "answers": dump(answers)}


def _swap(endpoint: Endpoint, registry: Registry, versions: tuple[int, int]) -> dict[str, float]:
    """Wait out a window without a swap, promote the version that is not served, and note when what happened."""
    before, asked_s = _watch(endpoint, QUIET_S)
    served, times = before.draft_version, {"quiet_s": asked_s}
    wanted = versions[0] if served == versions[1] else versions[1]
    registry.promote("draft", wanted)
    until_s = time.monotonic() + SWAP_TIMEOUT_S
    while True:
        asked_before_s, asked_s = asked_s, time.monotonic()
        status = endpoint.client.status()
        if status.swaps > before.swaps and "seen_s" not in times:
            times |= {"unseen_s": asked_before_s, "seen_s": time.monotonic()}
        if status.has_proven(wanted) and status.swap_ms is not None and "seen_s" in times:
            return {**times, "proven_s": time.monotonic(), "swap_ms": status.swap_ms}
        if time.monotonic() > until_s or status.refused:
            raise RuntimeError(f"the service did not take draft {wanted}: {status.untried}")
        time.sleep(POLL_S)


def _watch(endpoint: Endpoint, seconds: float) -> tuple[ServiceStatus, float]:
    """Ask for the status as often as during a swap, so that asking costs the same; return the last and its time."""
    until_s = time.monotonic() + seconds
    while True:
        status, asked_s = endpoint.client.status(), time.monotonic()
        if asked_s > until_s:
            return status, asked_s
        time.sleep(POLL_S)


def _restart(run: Run, endpoint: Endpoint, load: Load) -> Row:
    with run.bar("restart under load", 1) as bar:
        with load() as answers:
            time.sleep(SETTLE_S)
            started_s = time.monotonic()
            endpoint.stop()
            endpoint.start()
            _wait_for_answers(answers, since_s=time.monotonic())
            ended_s = time.monotonic()
        bar.advance()
    return {"started_s": started_s, "ended_s": ended_s, "answers": dump(answers)}


def _wait_for_answers(answers: Sequence[Answer], since_s: float) -> None:
    until_s = since_s + SWAP_TIMEOUT_S
    while not any(answer.status == "ok" and answer.sent_s > since_s for answer in list(answers)):
        if time.monotonic() > until_s:
            raise RuntimeError(f"nothing was answered for {SWAP_TIMEOUT_S:g} s after a restart")
        time.sleep(POLL_S)


def windows(swap: Mapping[str, float]) -> dict[str, Span]:
    """Return the windows of one swap: near it, without one and as long, and of the probation after it."""
    near = (swap["unseen_s"] - swap["swap_ms"] / 1000 - NEAR_S, swap["seen_s"] + NEAR_S)
    quiet = (swap["quiet_s"] - (near[1] - near[0]), swap["quiet_s"])
    return {"near a swap": near, "without": quiet, "probation": (near[1], max(swap["proven_s"], near[1]))}


def _report(run: Run, cells: Sequence[Row], restart: Row, references: Sequence[Row], same_files: bool) -> Report:
    answers = [row for cell in cells for row in cell["answers"]]
    groups: dict[str, list[list[float]]] = {"near a swap": [], "without": [], "probation": []}
    points: list[tuple[float, float]] = []
    for cell in cells:
        spans = [span for row in cell["answers"] for span in inter_token_spans(row["sent_s"], row["arrival_ms"])]
        for swap in cell["swaps"]:
            for kind, window in windows(swap).items():
                groups[kind].append(touching(spans, window))
            after = [(end - swap["seen_s"], 1000 * (end - start)) for start, end in spans]
            points += [(seconds, ms) for seconds, ms in after if abs(seconds) <= NEAR_S + QUIET_S]
    swaps = [swap for cell in cells for swap in cell["swaps"]]
    p99 = compare_percentiles(groups["near a swap"], groups["without"], 99, run.recipe.seed)
    pooled = {kind: [ms for group in of_kind for ms in group] for kind, of_kind in groups.items()}
    longest = max(pooled["near a swap"]) / max(pooled["without"])
    verdicts = answer_verdicts(references, answers)
    figures: Row = {
        "num_swaps": len(swaps),
        "num_requests": len(answers),
        "failed": _failed(answers),
        "outputs": dict(verdicts),
        "inter_token_ms": {
            kind: {"count": len(ms), "p50": percentile(ms, 50), "p99": percentile(ms, 99), "max": max(ms)}
            for kind, ms in pooled.items()
            if ms
        },
        "p99_ratio": p99.model_dump(),
        "max_ratio": longest,
        "swap_ms": spread_of([swap["swap_ms"] for swap in swaps]).model_dump(),
        "probation_s": spread_of([swap["proven_s"] - swap["seen_s"] for swap in swaps]).model_dump(),
        "restart": _restarted(restart),
    }
    columns = ["inter-token latency", "gaps", "p50 ms", "p99 ms", "max ms"]
    rows = [
        [kind, f"{one['count']}", *(f"{one[name]:.1f}" for name in ("p50", "p99", "max"))]
        for kind, one in figures["inter_token_ms"].items()
    ]
    outage = figures["restart"]
    costs = Grid(
        "what it costs",
        ["", "swaps", "restart"],
        [
            ["events", f"{len(swaps)}", "1"],
            ["requests", f"{len(answers)}", f"{outage['num_requests']}"],
            ["failed or truncated", *(f"{sum(one['failed'].values())}" for one in (figures, outage))],
            ["longest stall, s", f"{max(pooled['near a swap']) / 1000:.2f}", f"{outage['outage_s']:.1f}"],
            ["swap, ms", spread(figures["swap_ms"]), "–"],
            ["p99 near ÷ without", interval(p99.model_dump()), "–"],
            ["max near ÷ without", f"{longest:.2f}", "–"],
        ],
    )
    same = "There is one draft only: the swaps load its own files again, under another version."
    return Report(
        figures=figures,
        grids=[Grid("under constant load", columns, rows), costs],
        notes=[
            sentence(verdicts),
            "While the service restarts, a client that was refused asks again after 0.2 s.",
            *([same] if same_files else []),
        ],
        failures=differing(verdicts),
        picture=draw_latency({"all clients": points}, "seconds from a swap", run.folder / "swap.png"),
    )


def _failed(answers: Sequence[Row]) -> dict[str, int]:
    return dict(Counter(row["status"] for row in answers if row["status"] != "ok"))


def _restarted(cell: Row) -> Row:
    answers = cell["answers"]
    moments = [row["sent_s"] + ms / 1000 for row in answers for ms in row["arrival_ms"]]
    start, end = longest_silence(moments, (cell["started_s"], cell["ended_s"]))
    return {"outage_s": end - start, "num_requests": len(answers), "failed": _failed(answers)}
