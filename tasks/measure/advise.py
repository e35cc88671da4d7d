"""Which way of drafting a target, its traffic and a machine want: what each is expected to give, then what the best do.

Each way answers a sample of the traffic once, in the reference engine, with as many drafted tokens as it may have; what
fewer would give follows from that and from what rows of the target take here (`models.core.throughput.expected`), or in
a table of another machine, where nothing is timed. The best are measured in turns with plain decoding. One stream,
greedily; speeds are of decoding alone.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
from transformers import AutoTokenizer

from infra.machine import describe_machine
from infra.views.results import Grid, Report, interval
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
from tasks.measure.configurations import Configuration, Target, open_target, read_configurations
from tasks.measure.fit import toml
from tasks.measure.run import Bar, Run
from tasks.measure.specbench import PLAIN, WARM_TOKENS, chat_before, read_questions

QUESTION = "which way of drafting does this target want, on this traffic and this machine?"
SIZES = (1, 2, 3, 4, 6, 8, 12, 16)
ROWS = (1, 2, 3, 4, 5, 7, 9, 13, 17, 25, 33, 49, 64)
REPEATS = 9
NUM_MEASURED = 3
TREE_SIZES = (4, 8, 16)
ENDED = 8  # K where a policy ends a proposal before: it is seen as it is and not cut, as trees are
UNSURE = {"num_draft_tokens": ENDED, "lengths": {"name": "confidence"}}

Row = dict[str, Any]


def measure(run: Run, data: str | None, per_domain: int, max_tokens: int, costs: str | None) -> Report:
    """See, expect, measure and advise.

    Questions are those of a file or the recipe's held-out prompts, times those of a file or this machine's. ValueError
    if a file is wrong, nothing was built, or no prompt fits the context.
    """
    brought = None if costs is None else read_costs(Path(costs))
    run.served()
    target, ways = open_target(run), ways_of(run.recipe.num_draft_tokens)
    prompts = _prompts(run, data, per_domain, target, max_tokens)
    with run.bar("see what is accepted", (1 + len(ways)) * len(prompts)) as bar:
        rows = run.cells.keep("seen", lambda: _see(target, ways, prompts, max_tokens, bar))
    found = brought or Costs.model_validate(run.cells.keep("costs", lambda: _costs(target, rows[PLAIN], prompts)))
    (run.folder / "costs.json").write_text(found.model_dump_json(indent=2) + "\n")
    seen = {
        name: Seen([Step(*step) for step in rows[name]["steps"]], DraftingCost(*rows[name]["drafting"]), is_cut(way))
        for name, way in ways.items()
    }
    options = ranked(seen, SIZES, found)
    measured: dict[str, Row] = {}
    if brought is None:
        best = {option.way: sized(ways[option.way], option) for option in options[:NUM_MEASURED]}
        with run.bar("measure the best", (1 + len(best)) * len(prompts)) as bar:
            measured = run.cells.keep(
                "measured", lambda: _measure(target, best, prompts, max_tokens, run.recipe.seed, bar)
            )
    return make_report(run.recipe.name, options, seen, ways, found, measured)


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
    """Return the token ids of what is asked, as far as it fits the context."""
    encoder = ChatEncoder.of(AutoTokenizer.from_pretrained(target.directory))
    if data is None:
        asked = [prompt.encode(encoder) for prompt in run.prompts("held_out", per_domain)]
    else:
        questions = chain.from_iterable(read_questions(Path(data), per_domain).values())
        asked = [encoder.encode(chat_before(one, one.turns[0], {})) for one in questions]
    fitting = [prompt for prompt in asked if len(prompt) + max_tokens <= target.shared["max_model_len"]]
    if not fitting:
        raise ValueError(f"none of the {len(asked)} prompts fits the context; raise [engine] max_model_len")
    return fitting


def _see(
    target: Target, ways: Mapping[str, Configuration], prompts: Sequence[list[int]], max_tokens: int, bar: Bar
) -> dict[str, Row]:
    """Return what plain decoding took, and the steps of each way with what drafting took."""
    _, _, decoded = _steps(target.engine(None), prompts, max_tokens, bar)
    rows: dict[str, Row] = {PLAIN: {"ms": 1000 * sum(one.seconds for one in decoded) / sum(n for n, _ in decoded)}}
    for name, way in ways.items():
        steps, draft_ms, _ = _steps(target.engine(way), prompts, max_tokens, bar)
        drafting = DraftingCost(fmean(draft_ms) if draft_ms else 0.0)
        if is_cut(way):
            longest, whole_ms = _of_longest(steps, draft_ms)
            drafting = DraftingCost(whole_ms)
            if longest > 1:
                one = target.engine(sized(way, Option(name, 1, 0.0)))
                _, first_ms = _of_longest(*_steps(one, prompts[:1], max_tokens, None)[:2])
                drafting = DraftingCost(first_ms, max(0.0, (whole_ms - first_ms) / (longest - 1)))
        rows[name] = {"steps": [list(step) for step in steps], "drafting": list(drafting)}
    return rows


def _steps(
    engine: TorchEngine, prompts: Sequence[list[int]], max_tokens: int, bar: Bar | None
) -> tuple[list[Step], list[float], list[Decoded]]:
    """Return the steps of all answers, the ms that drafting took in each, and what decoding took by answer."""
    draft_ms: list[float] = []
    answers: list[Completion] = []
    _answer(engine, prompts[0], WARM_TOKENS)
    engine.on_step = lambda took: draft_ms.append(1000 * took.draft_s)
    for prompt in prompts:
        answers.append(_answer(engine, prompt, max_tokens))
        if bar is not None:
            bar.advance()
    steps = [step for answer in answers for step in map(Step, answer.drafted, answer.accepted)]
    return steps, draft_ms, list(map(_decoded, answers))


def _of_longest(steps: Sequence[Step], draft_ms: Sequence[float]) -> tuple[int, float]:
    """Return how long the longest proposals were, and the median ms that drafting one took."""
    longest = max((step.proposed for step in steps), default=0)
    of_longest = [ms for ms, step in zip(draft_ms, steps, strict=True) if step.proposed == longest]
    return longest, median(of_longest) if of_longest else 0.0


@torch.inference_mode()
def _costs(target: Target, plain: Row, prompts: Sequence[list[int]]) -> Row:
    """Return a `Costs` of this machine: rows of the target behind a prompt of the usual length, in turns."""
    decoder = target.decoder
    prompt = sorted(prompts, key=len)[len(prompts) // 2]
    cache = Cache(decoder, len(prompt) + max(ROWS))
    ids = torch.tensor(prompt, device=decoder.device)
    decoder.forward(ids, cache, ())
    times: dict[int, list[float]] = {rows: [] for rows in ROWS}
    for number in range(REPEATS + 1):
        for rows, took in times.items():
            block = ids[-1:].repeat(rows)
            started = time.perf_counter()
            states, _ = decoder.forward(block, cache, ())
            decoder.logits(states).argmax(-1).tolist()
            if number:  # the first time warms up
                took.append(1000 * (time.perf_counter() - started))
            cache.keep(len(prompt), [])
    rows_ms = {rows: median(took) for rows, took in times.items()}
    machine = describe_machine()
    return {
        "device": f"{machine['processor']}, {machine['cores']} cores",
        "rows_ms": rows_ms,
        "rest_ms": max(0.0, plain["ms"] - rows_ms[1]),
    }


def _measure(
    target: Target,
    ways: Mapping[str, Configuration],
    prompts: Sequence[list[int]],
    max_tokens: int,
    seed: int,
    bar: Bar,
) -> dict[str, Row]:
    """Return way to what it gives, in times plain decoding; all answer a prompt before the next one is asked."""
    sides = {PLAIN: target.engine(None)} | {name: target.engine(way) for name, way in ways.items()}
    for engine in sides.values():
        _answer(engine, prompts[0], WARM_TOKENS)
    took: dict[str, dict[str, Decoded]] = {name: {} for name in sides}
    same: Counter[str] = Counter()
    for number, prompt in enumerate(prompts):
        answers = {name: _answer(sides[name], prompt, max_tokens) for name in [*sides][:: -1 if number % 2 else 1]}
        for name, answer in answers.items():
            took[name][str(number)] = _decoded(answer)
            same[name] += answer.token_ids == answers[PLAIN].token_ids
            bar.advance()
    speeds = {name: compare_speed(took[name], took[PLAIN], seed) for name in ways}
    return {
        name: {"speedup": speed and speed.overall.model_dump(), "num_equal": same[name]}
        for name, speed in speeds.items()
    }


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
        shown = interval(speeds[option.way]) if option.way in speeds else "–"
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
