"""Which way of drafting a target, its traffic and a machine want: what each is expected to give, then what the best do.

Each way answers a sample of the traffic once, in the reference engine, with as many drafted tokens as it may have; what
fewer would give follows from that and from what rows of the target take here (`models.core.throughput.expected`), or in
a table of another machine, where nothing is timed. The best are measured in turns with plain decoding. One stream,
greedily; speeds are of decoding alone.

Domain by domain in turn, all ways answer a prompt before the next one is asked. So at any time it can end with what it
knows, and each answer is kept for a run that goes on.
"""

import asyncio
import json
import math
import time
from collections.abc import Mapping, Sequence
from itertools import chain, product, zip_longest
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
from transformers import AutoTokenizer

from infra.machine import describe_machine
from infra.views.results import Grid, Report, interval, out
from models.chats import ChatEncoder
from models.core.evaluation.latency import Decoded, compare_speed
from models.core.layers.decoder import Cache
from models.core.throughput.expected import (
    Costs,
    DraftingCost,
    Option,
    Seen,
    Step,
    acceptance_by_place,
    ranked,
    read_costs,
)
from models.engines import Completion, Sampling
from models.engines.torch import TorchEngine
from models.params import BaseParams
from models.recipe import toml
from models.sources import digest
from tasks.measure.cells import Cells
from tasks.measure.configurations import Configuration, Target, open_target, read_configurations
from tasks.measure.run import Bar, Run
from tasks.measure.specbench import PLAIN, WARM_TOKENS, chat_before, read_questions

QUESTION = "which way of drafting does this target want, on this traffic and this machine?"
SIZES = (1, 2, 3, 4, 6, 8, 12, 16)
ROWS = (1, 2, 3, 4, 5, 7, 9, 13, 17, 25, 33, 49, 64)
REPEATS = 9
NUM_MEASURED = 3
FEW_REPEATS = 3
SEEING, TIMING = 0.6, 0.7  # of the time, when each ends at the latest; the rest is to measure
TREE_SIZES = (4, 8, 16)
ENDED = 8  # K where a policy ends a proposal before: it is seen as it is and not cut, as trees are
UNSURE = {"num_draft_tokens": ENDED, "lengths": {"name": "confidence"}}

Row = dict[str, Any]


def measure(
    run: Run, data: str | None, per_domain: int, max_tokens: int, costs: str | None, limit_minutes: float = 0.0
) -> Report:
    """See, expect, measure and advise, within a limit, 0 for none; a run that goes on has as long again.

    Questions are those of a file or the recipe's held-out prompts, times those of a file or this machine's. ValueError
    if a file is wrong, nothing was built, or no prompt fits the context.
    """
    limit_s, started_s = 60 * limit_minutes or math.inf, time.monotonic()
    if limit_minutes:
        told = f"ends in {limit_minutes:g} minutes with what it knows then; the same command goes on from there"
        out.print(told, soft_wrap=True)
    brought = None if costs is None else read_costs(Path(costs))
    run.served()
    target, ways = open_target(run), ways_of(run.recipe.num_draft_tokens)
    prompts = _prompts(run, data, per_domain, target, max_tokens)
    with run.bar("see what is accepted", (1 + len(ways)) * len(prompts)) as bar:
        answers = _see(target, ways, prompts, max_tokens, run.cells, started_s + SEEING * limit_s, bar)
    plain, seen = answers.pop(PLAIN), {name: _seen(of_way, is_cut(ways[name])) for name, of_way in answers.items()}
    timed_s = started_s + TIMING * limit_s
    found = brought or _costs(run.cells.keep("rows", lambda: _rows_ms(target, prompts, timed_s)), plain)
    (run.folder / "costs.json").write_text(found.model_dump_json(indent=2) + "\n")
    options = ranked(seen, SIZES, found)
    measured: dict[str, Row] = {}
    if brought is None:
        best = {option.way: sized(ways[option.way], option) for option in options[:NUM_MEASURED]}
        with run.bar("measure the best", len(prompts)) as bar:
            ends_s, seed = started_s + limit_s, run.recipe.seed
            measured = _measure(target, best, prompts, max_tokens, seed, run.cells, ends_s, bar)
    report = make_report(run.recipe.name, options, seen, ways, found, measured)
    return report.model_copy(update={"notes": [*report.notes, *_left(len(plain), len(prompts), measured, ways, seen)]})


def ways_of(served_k: int) -> dict[str, Configuration]:
    """Return the ways to see: each draft that there is without training, and the served one also while it is sure.

    A chain has as many tokens as it may have, and what a policy ends as many as that lets it; a tree is another one for
    each number of tokens.
    """
    ways: dict[str, Configuration] = {}
    for name, way in read_configurations(None, served_k).items():
        sizes = (ENDED,) if "lengths" in way.engine else SIZES[-1:] if is_cut(way) else TREE_SIZES
        for size in sizes:
            sized_name = name if len(sizes) == 1 else f"{name}, {size} tokens"
            ways[sized_name] = way.model_copy(update={"engine": {**way.engine, "num_draft_tokens": size}})
    return {**ways, "served draft, while sure": ways["served draft"].model_copy(update={"engine": UNSURE})}


def is_cut(way: Configuration) -> bool:
    """Whether fewer tokens would be the first of those that it proposes."""
    return "lengths" not in way.engine and not hasattr(way.draft, "tree")


def sized(way: Configuration, option: Option) -> Configuration:
    size = {"num_draft_tokens": option.num_draft_tokens} if is_cut(way) else {}
    return way.model_copy(update={"engine": way.engine | size})


def _prompts(run: Run, data: str | None, per_domain: int, target: Target, max_tokens: int) -> list[list[int]]:
    """Return the token ids of what is asked, the domains in turn, as far as it fits the context."""
    encoder = ChatEncoder.of(AutoTokenizer.from_pretrained(target.directory))
    if data is None:
        domains = [[prompt.encode(encoder) for prompt in of] for of in run.by_domain("held_out", per_domain).values()]
    else:
        questions = read_questions(Path(data), per_domain).values()
        domains = [[encoder.encode(chat_before(one, one.turns[0], {})) for one in of] for of in questions]
    asked = [prompt for prompt in chain.from_iterable(zip_longest(*domains)) if prompt is not None]
    fitting = [prompt for prompt in asked if len(prompt) + max_tokens <= target.shared["max_model_len"]]
    if not fitting:
        raise ValueError(f"none of the {len(asked)} prompts fits the context; raise [engine] max_model_len")
    return fitting


def _see(
    target: Target,
    ways: Mapping[str, Configuration],
    prompts: Sequence[list[int]],
    max_tokens: int,
    cells: Cells,
    ends_s: float,
    bar: Bar,
) -> dict[str, list[Row]]:
    """Return what plain decoding and each way did, answer by answer, of the prompts that all of them were asked.

    If time is over before all were asked the first one, the others are left out; plain decoding and one way never are.
    A way that remembers earlier answers begins without them where a run goes on.
    """
    found: dict[str, list[Row]] = {name: [] for name in (PLAIN, *ways)}
    engines: dict[str, TorchEngine] = {}

    def answer(name: str, prompt: list[int], is_first: bool) -> Row:
        way = ways.get(name)
        if name not in engines:
            engines[name] = _warm(target, way, prompts[0])
        row = _answer_steps(engines[name], prompt, max_tokens)
        if is_first and way is not None and is_cut(way):
            one = _answer_steps(_warm(target, sized(way, Option(name, 1, 0.0)), prompt), prompt, max_tokens)
            row["first_ms"] = _of_longest([one])[1]
        return row

    for (number, prompt), (place, name) in product(enumerate(prompts), enumerate(found)):
        cell, enough = f"seen-{number}-{place}", sum(map(bool, found.values())) > 1
        if enough and not cells.has(cell) and time.monotonic() > ends_s:
            break
        found[name].append(cells.keep(cell, lambda: answer(name, prompt, not number)))  # noqa: B023 - called at once
        bar.advance()
    num_whole = max(1, min(map(len, found.values())))
    return {name: rows[:num_whole] for name, rows in found.items() if rows}


def _warm(target: Target, way: Configuration | None, prompt: list[int]) -> TorchEngine:
    engine = target.engine(way)
    _answer(engine, prompt, WARM_TOKENS)
    return engine


def _answer_steps(engine: TorchEngine, prompt: list[int], max_tokens: int) -> Row:
    """Return the steps of an answer, the ms that drafting took in each, and what decoding took."""
    draft_ms: list[float] = []
    engine.on_step = lambda took: draft_ms.append(1000 * took.draft_s)
    answer = _answer(engine, prompt, max_tokens)
    steps = [list(step) for step in zip(answer.drafted, answer.accepted, strict=True)]
    return {"steps": steps, "draft_ms": draft_ms, "decoded": list(_decoded(answer))}


def _seen(rows: Sequence[Row], cut: bool) -> Seen:
    steps = [Step(*step) for row in rows for step in row["steps"]]
    if not cut:
        draft_ms = [ms for row in rows for ms in row["draft_ms"]]
        return Seen(steps, DraftingCost(fmean(draft_ms) if draft_ms else 0.0), cut)
    longest, whole_ms = _of_longest(rows)
    if longest <= 1:
        return Seen(steps, DraftingCost(whole_ms), cut)
    first_ms = rows[0]["first_ms"]
    return Seen(steps, DraftingCost(first_ms, max(0.0, (whole_ms - first_ms) / (longest - 1))), cut)


def _of_longest(rows: Sequence[Row]) -> tuple[int, float]:
    """Return how long the longest proposals were, and the median ms that drafting one took."""
    drafted = [(proposed, ms) for row in rows for (proposed, _), ms in zip(row["steps"], row["draft_ms"], strict=True)]
    longest = max((proposed for proposed, _ in drafted), default=0)
    of_longest = [ms for proposed, ms in drafted if proposed == longest]
    return longest, median(of_longest) if of_longest else 0.0


@torch.inference_mode()
def _rows_ms(target: Target, prompts: Sequence[list[int]], ends_s: float) -> dict[int, float]:
    """Return what rows of the target take here, behind a prompt of the usual length, in turns; a few times at least."""
    decoder = target.decoder
    prompt = sorted(prompts, key=len)[len(prompts) // 2]
    cache = Cache(decoder, len(prompt) + max(ROWS))
    ids = torch.tensor(prompt, device=decoder.device)
    decoder.forward(ids, cache, ())
    times: dict[int, list[float]] = {rows: [] for rows in ROWS}
    for number in range(REPEATS + 1):
        if number > FEW_REPEATS and time.monotonic() > ends_s:
            break
        for rows, took in times.items():
            block = ids[-1:].repeat(rows)
            started = time.perf_counter()
            states, _ = decoder.forward(block, cache, ())
            decoder.logits(states).argmax(-1).tolist()
            if number:  # the first time warms up
                took.append(1000 * (time.perf_counter() - started))
            cache.keep(len(prompt), [])
    return {rows: median(took) for rows, took in times.items()}


def _costs(rows_ms: Mapping[str, float], plain: Sequence[Row]) -> Costs:
    """Return what steps take here, by rows of the target as a cell keeps them, and what plain decoding took."""
    plain_ms = 1000 * sum(row["decoded"][1] for row in plain) / sum(row["decoded"][0] for row in plain)
    machine = describe_machine()
    costs = {"device": f"{machine['processor']}, {machine['cores']} cores", "rows_ms": rows_ms}
    return Costs.model_validate({**costs, "rest_ms": max(0.0, plain_ms - rows_ms["1"])})


def _measure(
    target: Target,
    ways: Mapping[str, Configuration],
    prompts: Sequence[list[int]],
    max_tokens: int,
    seed: int,
    cells: Cells,
    ends_s: float,
    bar: Bar,
) -> dict[str, Row]:
    """Return way to what it gives, in times plain decoding, on the prompts for which there was time, one at least."""
    sides: dict[str, TorchEngine] = {}
    compared = digest(json.dumps({name: way.engine for name, way in ways.items()}))[:12]

    def answer(number: int, prompt: list[int]) -> Row:
        if not sides:
            sides.update({name: _warm(target, ways.get(name), prompts[0]) for name in (PLAIN, *ways)})
        answers = {name: _answer(sides[name], prompt, max_tokens) for name in [*sides][:: -1 if number % 2 else 1]}
        plain = answers[PLAIN].token_ids
        return {name: [*_decoded(answer), answer.token_ids == plain] for name, answer in answers.items()}

    rows: list[Row] = []
    for number, prompt in enumerate(prompts):
        cell = f"measured-{compared}-{number}"
        if rows and not cells.has(cell) and time.monotonic() > ends_s:
            break
        rows.append(cells.keep(cell, lambda: answer(number, prompt)))  # noqa: B023 - called at once
        bar.advance()
    took = {name: {str(n): Decoded(*row[name][:2]) for n, row in enumerate(rows)} for name in (PLAIN, *ways)}
    speeds = {name: compare_speed(took[name], took[PLAIN], seed) for name in ways}
    return {
        name: {
            "speedup": speed and speed.overall.model_dump(),
            "num_equal": sum(row[name][2] for row in rows),
            "num_prompts": len(rows),
        }
        for name, speed in speeds.items()
    }


def _left(
    num_seen: int,
    num_prompts: int,
    measured: Mapping[str, Row],
    ways: Mapping[str, Configuration],
    seen: Mapping[str, Seen],
) -> list[str]:
    """Return what there was no time for, in words; nothing if there was for all."""
    num_measured = min((row["num_prompts"] for row in measured.values()), default=num_prompts)
    if min(num_seen, num_measured) == num_prompts:
        return []
    unseen = f"; not seen yet: {', '.join(sorted({*ways} - {*seen}))}" if len(seen) < len(ways) else ""
    told = f"Of {num_prompts} prompts {num_seen} were seen and {num_measured} measured in the time given{unseen}."
    return [told, "The same command goes on from there."]


def _answer(engine: TorchEngine, prompt: list[int], max_tokens: int) -> Completion:
    sampling = Sampling(max_tokens=max_tokens, ignore_eos=True, drafting="auto")
    return asyncio.run(engine.generate(prompt, sampling, "sample"))


def _decoded(answer: Completion) -> Decoded:
    """Return what the tokens after the first took; answers go on past their end, so that there are some."""
    num_tokens = len(answer.token_ids) - 1
    return Decoded(num_tokens, answer.per_token_ms * num_tokens / 1000)


def make_report(
    recipe: str,
    options: Sequence[Option],
    seen: Mapping[str, Seen],
    ways: Mapping[str, Configuration],
    costs: Costs,
    measured: Mapping[str, Row],
) -> Report:
    """Put expectation and measurement, empty where nothing was, side by side; `options` are the fastest first."""
    speeds = {name: row["speedup"] for name, row in measured.items() if row["speedup"]}
    rows = []
    for option in options:
        places = acceptance_by_place(seen[option.way].steps)
        shown = "–"
        if (speed := speeds.get(option.way)) is not None:  # one prompt has no interval
            shown = interval(speed) if measured[option.way]["num_prompts"] > 1 else f"{speed['value']:.2f}"
        tokens = " ".join(f"{place:.2f}" for place in places[:8]) or "–"
        rows.append([option.way, str(option.num_draft_tokens), f"{option.speedup:.2f}", shown, tokens])
    columns = ["way", "K", "expected, × plain", "measured, × plain", "accepted by place"]
    table = [[str(number), f"{ms:.2f}", f"{ms / costs.target_ms(1):.2f}"] for number, ms in costs.rows_ms.items()]
    known = [option for option in options if option.way in speeds]
    best = max(known, key=lambda option: float(speeds[option.way]["value"])) if known else options[0]
    gain = speeds[best.way]["value"] if known else best.speedup
    named, at = f"{best.way} with K = {best.num_draft_tokens}", f"{'measured' if speeds else 'expected'} at {gain:.2f}×"
    notes = [
        f"{named}: {at} plain decoding." if gain > 1 else f"Don't speculate: the best, {named}, is {at} plain.",
        "One stream, greedy, decoding alone; in brackets 95% intervals over prompts.",
        f"Times are of {costs.device or 'the table that was given'}.",
    ]
    if gain > 1:
        notes += [
            f"To be pasted into recipe {recipe}:",
            "",
            "```toml",
            toml(recipe_tables(ways[best.way], best)),
            "```",
        ]
    return Report(
        figures={
            "options": [option._asdict() for option in options],
            "costs": costs.model_dump(mode="json"),
            "measured": dict(measured),
            "missed_by": {option.way: option.speedup / speeds[option.way]["value"] - 1 for option in known},
        },
        grids=[Grid("ways of drafting", columns, rows), Grid("the target", ["rows", "ms", "× one row"], table)],
        notes=notes,
    )


def recipe_tables(way: Configuration, option: Option) -> dict[str, dict[str, Any]]:
    """Return the tables of a recipe that drafts so; the served draft is the recipe's own."""
    draft = {"draft": way.draft.model_dump(mode="json", exclude_none=True)} if isinstance(way.draft, BaseParams) else {}
    return {**draft, "engine": {"name": "torch", **sized(way, option).engine}}
