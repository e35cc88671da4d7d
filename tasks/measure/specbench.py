"""Spec-Bench: how much faster configurations of the reference engine answer than the same engine without a draft.

All of them share one process, one copy of the target's weights and the same prompts, one stream, greedily. Prompt by
prompt plain decoding and the configurations take turns, in an order that is turned round each time, and ratios are
paired by prompt. A speed counts from the start of a request to its last token, the prompt included, as in Spec-Bench.
The second turn of a chat goes on from what plain decoding answered, so that all are asked the same.

A cell is a few prompts of a task. What a draft remembers of earlier requests is forgotten between cells, so that an
interrupted run goes on with the same figures.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from infra.views.figures import draw_speeds
from infra.views.results import Grid, Report, interval
from models.acceptance import Trace, summarise
from models.engines import Sampling
from models.engines.torch import TorchEngine
from models.tokens import encode_chat
from tasks.measure.compare_traffic import judge_outputs
from tasks.measure.configurations import Configuration, Target, open_target, read_configurations
from tasks.measure.latency import Decoded, compare_speed, spread
from tasks.measure.questions import Question, chat_before, fingerprint, read_questions
from tasks.measure.run import Bar, Run
from tasks.promote import open_champions

TITLE, QUESTION = "Spec-Bench", "which way of drafting is the fastest, task by task?"
PLAIN, ALL = "plain decoding", "all tasks"
WARM_TOKENS = 8

Row = dict[str, Any]


def measure(run: Run, data: str, configurations: str | None, per_task: int, per_cell: int, max_tokens: int) -> Report:
    """Answer every question in every configuration.

    Args:
        run: the benchmark.
        data: file of the questions.
        configurations: file of the configurations; None for what there is without training.
        per_task: questions of each task, 0 for all.
        per_cell: questions that are measured and kept together.
        max_tokens: of an answer.

    Raises:
        ValueError: a file is wrong, nothing was built, or the cells are of other questions or configurations.
    """
    run.served()
    tasks = read_questions(Path(data), per_task)
    ways = read_configurations(Path(configurations) if configurations else None, run.recipe.num_draft_tokens)
    if PLAIN in ways:
        raise ValueError(f'a configuration is called "{PLAIN}", which is the baseline\'s name')
    asked = {
        "questions": fingerprint(tasks),
        "configurations": {name: way.model_dump(mode="json") for name, way in ways.items()},
    }
    if run.cells.keep("asked", lambda: asked) != asked:
        raise ValueError(
            f"{run.folder} holds cells of other questions or configurations; remove it, or choose another with --output"
        )
    target: Target | None = None
    rows: list[Row] = []
    for task, questions in tasks.items():
        for start in range(0, len(questions), per_cell):
            cell, share = f"{task}-{start}".replace("/", "_"), questions[start : start + per_cell]
            if not run.cells.has(cell):
                target = target or _warm(open_target(run), ways)
                total = (1 + len(ways)) * sum(question.num_turns for question in share)
                with run.bar(f"{task}, {start + 1} to {start + len(share)} of {len(questions)}", total) as bar:
                    content = _answer(target, ways, share, max_tokens, bar)
                run.cells.keep(cell, lambda: content)  # noqa: B023
            rows += run.cells.read(cell)
    return make_report(rows, [*ways], open_champions.fn().target_files.path, run.folder, run.recipe.seed)


def _warm(target: Target, ways: Mapping[str, Configuration]) -> Target:
    """Let each way answer once, so that no first pass is timed."""
    sampling = Sampling(max_tokens=WARM_TOKENS, ignore_eos=True)
    for way in (None, *ways.values()):
        asyncio.run(target.engine(way).generate([1] * WARM_TOKENS, sampling, "warm"))
    return target


def _answer(
    target: Target, ways: Mapping[str, Configuration], questions: Sequence[Question], max_tokens: int, bar: Bar
) -> list[Row]:
    """Return a row for each turn and side; a turn that does not fit the context has none, nor those after it."""
    tokenizer = AutoTokenizer.from_pretrained(target.directory)
    plain, engines = target.engine(None), {name: target.engine(way) for name, way in ways.items()}
    limit = target.shared["max_model_len"] - max_tokens
    rows: list[Row] = []
    turned = False
    for question in questions:
        answered: dict[int, str] = {}
        for turn, place in enumerate(question.turns()):
            prompt_ids = encode_chat(tokenizer, chat_before(question, place, answered))
            fits = len(prompt_ids) <= limit
            about = {"prompt_id": f"{question.id}-{turn}", "domain": question.domain, "fits": fits}
            if not fits:
                rows.append(about)
                break
            sides = [(PLAIN, plain), *engines.items()]
            found = {}
            for name, engine in sides[::-1] if turned else sides:
                found[name] = {"side": name, **about, **_timed(engine, prompt_ids, max_tokens)}
                bar.advance()
            turned = not turned
            rows += [found[name] for name, _ in sides]
            answered[place] = str(tokenizer.decode(found[PLAIN]["token_ids"], skip_special_tokens=True))
    return rows


def _timed(engine: TorchEngine, prompt_ids: list[int], max_tokens: int) -> Row:
    sampling = Sampling(max_tokens=max_tokens, num_logprobs=2)  # all sides tell the gaps, which outputs are judged by
    started_s = time.perf_counter()
    answer = asyncio.run(engine.generate(prompt_ids, sampling, "question"))
    return {
        "seconds": time.perf_counter() - started_s,
        "token_ids": answer.token_ids,
        "gaps": answer.gaps,
        "drafted_per_step": answer.drafted,
        "accepted_per_step": answer.accepted,
    }


def make_report(rows: Sequence[Row], ways: Sequence[str], target_dir: Path, folder: Path, seed: int) -> Report:
    """Put together what was measured.

    Args:
        rows: of all cells.
        ways: the configurations' names, in order.
        target_dir: of the target, which says when a near tie may go either way.
        folder: for the picture.
        seed: of the intervals.

    Raises:
        ValueError: no question fits the context.
    """
    told = [row for row in rows if row["fits"]]
    if not told:
        raise ValueError(f"none of the {len(rows)} questions fits the context; raise [engine] max_model_len")
    tasks = [*dict.fromkeys(row["domain"] for row in told)]
    figures: dict[str, dict[str, Row]] = {}
    for task in (*tasks, ALL):
        of = {
            side: [row for row in told if row["side"] == side and task in (row["domain"], ALL)]
            for side in (PLAIN, *ways)
        }
        figures[task] = {side: _figures(of[PLAIN], of[side], target_dir, seed) for side in of}
    failures = [
        f"{way}: {number} of {figures[ALL][way]['num_prompts']} outputs differ from plain decoding"
        for way in ways
        if (number := figures[ALL][way]["outputs"].get("different"))
    ]
    notes = [
        "One stream, greedy; seconds of a whole request, its prompt included. In brackets 95% intervals over prompts.",
        "Speeds are only of prompts whose output passed. Drafts forget earlier requests after each cell.",
        "Of a tree, acceptance by place is the share of steps that accepted so many tokens.",
    ]
    if left_out := len(rows) - len(told):
        notes.append(f"{left_out} turns did not fit the context, and no later turn of their chats was asked.")
    speeds = {task: {way: _bar(found[way]) for way in ways if found[way]["speedup"]} for task, found in figures.items()}
    return Report(
        figures={"tasks": figures},
        grids=_grids(figures, ways),
        notes=notes,
        verdict=judge(figures[ALL], ways),
        failures=failures,
        picture=draw_speeds(speeds, "× plain decoding", folder / "specbench.png"),
    )


def _figures(plain: Sequence[Row], rows: Sequence[Row], target_dir: Path, seed: int) -> Row:
    verdicts = judge_outputs(plain, rows, target_dir)
    passed = {row["prompt_id"] for row in rows if verdicts[row["prompt_id"]] != "different"}
    here, there = (
        {row["prompt_id"]: Decoded(len(row["token_ids"]), row["seconds"]) for row in side if row["prompt_id"] in passed}
        for side in (rows, plain)
    )
    speedup = compare_speed(here, there, seed)
    traces = [
        Trace(
            request_id=row["prompt_id"],
            token_ids=tuple(row["token_ids"]),
            drafted=tuple(row["drafted_per_step"]),
            accepted=tuple(row["accepted_per_step"]),
            domain=row["domain"],
        )
        for row in rows
    ]
    accepted = summarise(traces, seed)
    places = [place.value for place in accepted.per_position]
    while places and not places[-1]:
        places.pop()
    return {
        "num_prompts": len(rows),
        "outputs": dict(Counter(verdicts.values())),
        "tokens_per_s": spread([one.num_tokens / one.seconds for one in here.values()]).model_dump() if here else None,
        "speedup": speedup.model_dump() if speedup else None,
        "tau": accepted.tau.model_dump() if accepted.tau else None,
        "tau_without_loops": accepted.tau_without_loops.model_dump() if accepted.tau_without_loops else None,
        "acceptance_by_place": places,
    }


def _bar(found: Row) -> tuple[float, float, float]:
    prompts = found["speedup"]["prompts"]
    return prompts["median"], prompts["p10"], prompts["p90"]


def _grids(figures: Mapping[str, Mapping[str, Row]], ways: Sequence[str]) -> list[Grid]:
    speedups = {way: [found[way]["speedup"] for found in figures.values()] for way in ways}
    speed = [[way, *(interval(one["overall"]) if one else "–" for one in found)] for way, found in speedups.items()]
    rows = []
    for side in (PLAIN, *ways):
        found = figures[ALL][side]
        outputs = found["outputs"]
        rows.append(
            [
                side,
                f"{found['tokens_per_s']['median']:.1f}" if found["tokens_per_s"] else "–",
                f"{found['tau']['value']:.2f}" if found["tau"] else "–",
                f"{found['tau_without_loops']['value']:.2f}" if found["tau_without_loops"] else "–",
                " ".join(f"{place:.2f}" for place in found["acceptance_by_place"]) or "–",
                f"{outputs.get('equal', 0)} / {outputs.get('near-tie', 0)} / {outputs.get('different', 0)}",
            ]
        )
    columns = ["way", "tokens/s", "τ", "τ without loops", "acceptance by place", "equal / near tie / different"]
    return [Grid("times plain decoding", ["way", *figures], speed), Grid("over all tasks", columns, rows)]


def judge(found: Mapping[str, Row], ways: Sequence[str]) -> str:
    """Say which way is the fastest over all tasks, and whether it is faster than plain decoding at all."""
    speeds = {way: found[way]["speedup"]["overall"] for way in ways if found[way]["speedup"]}
    if not speeds:
        return "No configuration has an output that passed."
    best = max(speeds, key=lambda way: float(speeds[way]["value"]))
    told = f"{best}: {interval(speeds[best])}× plain decoding over all tasks"
    if speeds[best]["value"] <= 1:
        return f"No way is faster than plain decoding; least is lost with {told}."
    return f"The fastest is {told}{'' if speeds[best]['low'] > 1 else ', which may be luck'}."
