"""Spec-Bench: how much faster configurations of the reference engine answer than the same engine without a draft.

All of them share one process and one copy of the target's weights, one stream. Prompt by prompt plain decoding and the
configurations take turns, in an order that is turned round each time, and ratios are paired by prompt. A speed counts
from the start of a request to its last token, the prompt included, as in Spec-Bench, and once more from its first
token. The second turn of a chat goes on from what plain decoding answered, so that all are asked the same.

Greedy outputs are held to plain decoding's. Above temperature 0 each way draws an answer of its own, so there is
nothing to hold them to: that a rule keeps the target's distribution is tested elsewhere, and one that doesn't is named.

A cell is a few prompts of a task at one temperature. What a draft remembers of earlier requests is forgotten between
cells, so that an interrupted run goes on with the same figures.
"""

import asyncio
import hashlib
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise, product
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field
from transformers import AutoTokenizer

from infra.views.figures import draw_speeds
from infra.views.results import Grid, Report, interval
from models import catalog
from models.chats import ChatEncoder
from models.core.evaluation.acceptance import summarise
from models.core.evaluation.latency import Decoded, compare_speed, spread
from models.engines import Sampling
from models.engines.torch import Params, TorchEngine
from models.params import validate
from models.rowfiles import read_rows
from models.sources import Message, Prompt
from tasks.measure.compare_traffic import output_verdicts, traces_of
from tasks.measure.configurations import (
    Configuration,
    Target,
    every_family,
    make_drafts,
    open_target,
    read_configurations,
)
from tasks.measure.run import Bar, Run
from tasks.promote import open_champions
from tasks.register import first_samples

QUESTION = "which way of drafting is the fastest, task by task?"
PLAIN, ALL = "plain decoding", "all tasks"
VERDICTS = ("equal", "near-tie", "different")
WARM_TOKENS = 8

Row = dict[str, Any]


class Question(BaseModel):
    """A question in Spec-Bench's fields; what else its row has is not read.

    A message of the user that none of the assistant follows is a turn.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    id: str = Field(min_length=1)
    domain: str = Field(min_length=1)
    messages: tuple[Message, ...] = Field(min_length=1)

    @property
    def turns(self) -> list[int]:
        """How many messages come before each answer that it waits for."""
        roles = [*(message.role for message in self.messages), ""]
        steps = enumerate(pairwise(roles), start=1)
        return [place for place, (role, after) in steps if role == "user" and after != "assistant"]


def read_questions(file: Path, per_task: int) -> dict[str, list[Question]]:
    """Return task to its first questions, in the file's order, all for 0.

    ValueError names the row that can't be read, whose id occurs twice, or in which nobody waits for an answer.
    """
    tasks: dict[str, list[Question]] = {}
    seen: set[str] = set()
    for place, row in read_rows(file):
        question = validate(Question, row, f"{file}, {place}")
        if question.id in seen:
            raise ValueError(f"{file}, {place}: id {question.id} occurs twice")
        if not question.turns:
            raise ValueError(f"{file}, {place}: no message of the user waits for an answer")
        seen.add(question.id)
        of_task = tasks.setdefault(question.domain, [])
        if not per_task or len(of_task) < per_task:
            of_task.append(question)
    if not tasks:
        raise ValueError(f"{file} has no rows")
    return tasks


def as_questions(prompts: Iterable[Prompt]) -> dict[str, list[Question]]:
    """Return domain to its prompts as questions of one turn; ValueError if one has tools or template arguments."""
    tasks: dict[str, list[Question]] = {}
    for prompt in prompts:
        if prompt.fields():
            raise ValueError(f"a prompt of {prompt.domain} has {', '.join(prompt.fields())}, which no question has")
        asked = Question(id=prompt.id, domain=prompt.domain, messages=prompt.messages)
        tasks.setdefault(asked.domain, []).append(asked)
    return tasks


def fingerprint(tasks: dict[str, list[Question]]) -> str:
    asked = "".join(question.model_dump_json() for of_task in tasks.values() for question in of_task)
    return hashlib.sha256(asked.encode()).hexdigest()


def chat_before(question: Question, place: int, answers: dict[int, str]) -> list[dict[str, Any]]:
    """Return the messages that the answer at a place follows, see `Question.turns`, with the answers before."""
    chat: list[dict[str, Any]] = []
    for number, message in enumerate(question.messages[:place], start=1):
        chat.append(message.as_openai())
        if number in answers:
            chat.append({"role": "assistant", "content": answers[number]})
    return chat


def measure(
    run: Run,
    data: str | None,
    configurations: str | None,
    per_task: int,
    per_cell: int,
    max_tokens: int,
    temperatures: Sequence[float],
    minutes: float,
) -> Report:
    """Answer every question in every configuration at every temperature.

    Without a file of questions they are the recipe's held-out prompts; without one of configurations every family
    is measured where drafts are made, which 0 minutes don't, else what there is without that. ValueError if a file is
    wrong, nothing was built, a temperature is below 0, or the cells are of other questions or configurations.
    """
    if below := [one for one in temperatures if one < 0]:
        raise ValueError(f"a temperature is 0 or more; got {below[0]:g}")
    run.served()
    tasks = as_questions(run.prompts("held_out", per_task)) if data is None else read_questions(Path(data), per_task)
    k = run.recipe.num_draft_tokens
    if configurations is None and minutes:
        ways = every_family(run.recipe)
    else:
        ways = read_configurations(Path(configurations) if configurations else None, k, makes=minutes > 0)
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
    pair = open_champions.fn()
    target: Target | None = None
    rows: dict[float, list[Row]] = {one: [] for one in temperatures}
    for temperature, task in product(rows, tasks):
        questions, at = tasks[task], f"-at-{temperature:g}" if temperature else ""
        for start in range(0, len(questions), per_cell):
            cell, share = f"{task}-{start}{at}".replace("/", "_"), questions[start : start + per_cell]
            if not run.cells.has(cell):
                if target is None:
                    if minutes:
                        ways = make_drafts(run.recipe, pair.target_files, first_samples(pair.draft), ways, minutes)
                    target = _warm(open_target(run), ways)
                total = (1 + len(ways)) * sum(len(question.turns) for question in share)
                told = f"{task}{_at(temperature)}, {start + 1} to {start + len(share)} of {len(questions)}"
                with run.bar(told, total) as bar:
                    content = _answer(target, ways, share, max_tokens, bar, temperature, run.recipe.seed)
                run.cells.keep(cell, lambda: content)  # noqa: B023
            rows[temperature] += run.cells.read(cell)
    return make_report(rows, ways, pair.target_files.path, run.folder, run.recipe.seed)


def _at(temperature: float) -> str:
    return f", temperature {temperature:g}" if temperature else ""


def _warm(target: Target, ways: Mapping[str, Configuration]) -> Target:
    """Let each way answer once, so that no first pass is timed."""
    sampling = Sampling(max_tokens=WARM_TOKENS, ignore_eos=True)
    for way in (None, *ways.values()):
        asyncio.run(target.engine(way).generate([1] * WARM_TOKENS, sampling, "warm"))
    return target


def _answer(
    target: Target,
    ways: Mapping[str, Configuration],
    questions: Sequence[Question],
    max_tokens: int,
    bar: Bar,
    temperature: float = 0.0,
    seed: int = 0,
) -> list[Row]:
    """Return a row for each turn and side; a turn that does not fit the context has none, nor those after it."""
    tokenizer = AutoTokenizer.from_pretrained(target.directory)
    encoder = ChatEncoder.of(tokenizer)
    plain, engines = target.engine(None), {name: target.engine(way) for name, way in ways.items()}
    limit = target.shared["max_model_len"] - max_tokens
    rows: list[Row] = []
    turned = False
    for question in questions:
        answered: dict[int, str] = {}
        for turn, place in enumerate(question.turns):
            prompt_ids = encoder.encode(chat_before(question, place, answered))
            fits = len(prompt_ids) <= limit
            about = {"prompt_id": f"{question.id}-{turn}", "domain": question.domain, "fits": fits}
            if not fits:
                rows.append(about)
                break
            # All sides tell the gaps, which greedy outputs are judged by.
            sampling = Sampling(
                max_tokens=max_tokens, temperature=temperature, seed=seed + len(rows), num_logprobs=2, drafting="auto"
            )
            sides = [(PLAIN, plain), *engines.items()]
            found = {}
            for name, engine in sides[::-1] if turned else sides:
                found[name] = {"side": name, **about, **_timed(engine, prompt_ids, sampling)}
                bar.advance()
            turned = not turned
            rows += [found[name] for name, _ in sides]
            answered[place] = str(tokenizer.decode(found[PLAIN]["token_ids"], skip_special_tokens=True))
    return rows


def _timed(engine: TorchEngine, prompt_ids: list[int], sampling: Sampling) -> Row:
    started_s = time.perf_counter()
    answer = asyncio.run(engine.generate(prompt_ids, sampling, "question"))
    return {
        "seconds": time.perf_counter() - started_s,
        "decode_s": answer.per_token_ms * (len(answer.token_ids) - 1) / 1000,
        "token_ids": answer.token_ids,
        "gaps": answer.gaps,
        "drafted_per_step": answer.drafted,
        "accepted_per_step": answer.accepted,
    }


def make_report(
    rows: Mapping[float, Sequence[Row]], ways: Mapping[str, Configuration], target_dir: Path, folder: Path, seed: int
) -> Report:
    """Put together what was measured; ValueError if no question fits the context."""
    told = {at: [row for row in of if row["fits"]] for at, of in rows.items()}
    num_rows, num_told = (sum(map(len, of.values())) for of in (rows, told))
    if not num_told:
        raise ValueError(f"none of the {num_rows} questions fits the context; raise [engine] max_model_len")
    found = {at: _by_task(of, [*ways], at == 0, target_dir, seed) for at, of in told.items()}
    over_all = {at: tasks[ALL] for at, tasks in found.items()}
    failures = [
        f"{way}: {number} of {over_all[0][way]['num_prompts']} outputs differ from plain decoding"
        for way in (ways if 0 in over_all else ())
        if (number := over_all[0][way]["outputs"].get("different"))
    ]
    rules = {name: catalog.load("verify", Params(**way.engine).verify.name) for name, way in ways.items()}
    lossy, left_out = ", ".join(name for name, rule in rules.items() if not rule.LOSSLESS), num_rows - num_told
    further = {
        f"Above temperature 0 these draw from another distribution than the target: {lossy}.": any(over_all) and lossy,
        f"{left_out} turns did not fit the context, and no later turn of their chats was asked.": left_out,
    }
    notes = [
        "One stream; seconds of a whole request, its prompt included. In brackets 95% intervals over prompts.",
        "Speeds are only of prompts whose output passed. Drafts forget earlier requests after each cell.",
        "Of a tree, acceptance by place is the share of steps that accepted so many tokens.",
        *(note for note, holds in further.items() if holds),
    ]
    speeds = {
        f"{task}{_at(at)}": {way: of[way]["speedup"]["prompts"] for way in ways if of[way]["speedup"]}
        for at, tasks in found.items()
        for task, of in tasks.items()
    }
    return Report(
        figures={"temperatures": {f"{at:g}": {"tasks": tasks} for at, tasks in found.items()}},
        grids=[
            *(grid for at, tasks in found.items() for grid in _speeds(tasks, ways, at)),
            *_over_all(over_all, ways),
        ],
        notes=notes,
        failures=failures,
        picture=draw_speeds(speeds, "× plain decoding", folder / "specbench.png"),
    )


def _by_task(
    rows: Sequence[Row], ways: Sequence[str], greedy: bool, target_dir: Path, seed: int
) -> dict[str, dict[str, Row]]:
    tasks, sides = (*dict.fromkeys(row["domain"] for row in rows), ALL), (PLAIN, *ways)

    def of(task: str, side: str) -> list[Row]:
        return [row for row in rows if row["side"] == side and task in (row["domain"], ALL)]

    return {
        task: {side: _figures(of(task, PLAIN), of(task, side), greedy, target_dir, seed) for side in sides}
        for task in tasks
    }


def _figures(plain: Sequence[Row], rows: Sequence[Row], greedy: bool, target_dir: Path, seed: int) -> Row:
    verdicts = output_verdicts(plain, rows, target_dir) if greedy else {}
    passed = {row["prompt_id"] for row in rows if verdicts.get(row["prompt_id"]) != "different"}
    kept = [[row for row in side if row["prompt_id"] in passed] for side in (rows, plain)]
    here, there = ({row["prompt_id"]: Decoded(len(row["token_ids"]), row["seconds"]) for row in side} for side in kept)
    speedup, decoding = compare_speed(here, there, seed), compare_speed(_decoding(kept[0]), _decoding(kept[1]), seed)
    accepted = summarise(traces_of(rows), seed)
    places = [place.value for place in accepted.per_position]
    while places and not places[-1]:
        places.pop()
    return {
        "num_prompts": len(rows),
        "outputs": dict(Counter(verdicts.values())),
        "tokens_per_s": spread([one.num_tokens / one.seconds for one in here.values()]).model_dump() if here else None,
        "speedup": speedup.model_dump() if speedup else None,
        "decoding_speedup": decoding.model_dump() if decoding else None,
        "tau": accepted.tau.model_dump() if accepted.tau else None,
        "tau_without_loops": accepted.tau_without_loops.model_dump() if accepted.tau_without_loops else None,
        "acceptance_by_place": places,
    }


def _decoding(rows: Iterable[Row]) -> dict[str, Decoded]:
    timed = {row["prompt_id"]: Decoded(len(row["token_ids"]) - 1, row["decode_s"]) for row in rows}
    return {prompt: one for prompt, one in timed.items() if one.seconds > 0}


def _speeds(tasks: Mapping[str, Mapping[str, Row]], ways: Iterable[str], at: float) -> Iterator[Grid]:
    for title, key in (("times plain decoding", "speedup"), ("the same after the first token", "decoding_speedup")):
        rows = [[way, *(_ratio(found[way], key) for found in tasks.values())] for way in ways]
        yield Grid(f"{title}{_at(at)}", ["way", *tasks], rows)


def _over_all(over_all: Mapping[float, Mapping[str, Row]], ways: Iterable[str]) -> Iterator[Grid]:
    """Yield the figures over all tasks, and where there are several temperatures first a table of all of them."""
    sides = (PLAIN, *ways)
    if len(over_all) > 1:
        columns = [name for at in over_all for name in (f"×{_at(at) or ', greedy'}", f"τ{_at(at) or ', greedy'}")]
        rows = [
            [side, *(cell for of in over_all.values() for cell in (_ratio(of[side]), _tau(of[side])))] for side in sides
        ]
        yield Grid("over all tasks, by temperature", ["way", *columns], rows)
    for at, of in over_all.items():
        rows = [
            [
                side,
                f"{of[side]['tokens_per_s']['median']:.1f}" if of[side]["tokens_per_s"] else "–",
                _tau(of[side]),
                f"{of[side]['tau_without_loops']['value']:.2f}" if of[side]["tau_without_loops"] else "–",
                " ".join(f"{place:.2f}" for place in of[side]["acceptance_by_place"]) or "–",
                *([] if at else [" / ".join(str(of[side]["outputs"].get(one, 0)) for one in VERDICTS)]),
            ]
            for side in sides
        ]
        columns = [
            "way",
            "tokens/s",
            "τ",
            "τ without loops",
            "acceptance by place",
            *([] if at else ["equal / near tie / different"]),
        ]
        yield Grid(f"over all tasks{_at(at)}", columns, rows)


def _ratio(figures: Row, key: str = "speedup") -> str:
    return interval(figures[key]["overall"]) if figures[key] else "–"


def _tau(figures: Row) -> str:
    return f"{figures['tau']['value']:.2f}" if figures["tau"] else "–"
