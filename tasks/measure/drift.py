"""How fast a draft follows when traffic shifts, what it forgets, and what happens when the old traffic returns.

The served draft's line meets requests of one further domain only, window after window, and after them windows of a
domain that it has known. The target answers all of them greedily, as the service logs them. The ways to follow:

- frozen: the served draft, left alone;
- redraft: each window is logged by `redraft import-logs` and ended by `redraft refresh`; the champion is what counts;
- online distillation: as in arXiv:2310.07177: after every eight requests one step on them, at a learning rate of 1e-4,
  without replay and without a gate;
- from scratch: a new draft of all requests so far, with the recipe's settings of a build;
- pool: of the drafts that have served, the one that is best at the window; nothing is trained.

The specialist that they are held to has learnt twice as many requests of the further domain, without replay and for
twice as many passes. Acceptance is counted on the target's own answers to held-out prompts.
"""

import asyncio
import gc
import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from shutil import rmtree
from typing import Any, NamedTuple

from transformers import AutoTokenizer

from infra.artifacts import Artifact, open_artifact
from infra.registry import open_registry
from infra.versions import Pair
from infra.views.figures import draw_refreshes
from infra.views.gate import DATA
from infra.views.results import Grid, Report, interval
from models import catalog
from models.chats import ChatEncoder
from models.core.drafting.draft_families import family_of, open_draft
from models.core.evaluation.acceptance import Trace, difference, mean_accepted_length, summarise
from models.core.evaluation.scoring import trace
from models.core.learning import distill
from models.core.learning.hidden import Sample
from models.drafts import Draft
from models.recipe import Traffic
from models.sources import Prompt, dataset
from models.types import Estimate, GateReport
from tasks.distill_draft import prepare_teachers, untrained
from tasks.generate_answers import ANSWERS, answer_prompts, open_engine
from tasks.measure.run import Run, files_of, first_pair
from tasks.select_data import choose_more

QUESTION = "how fast does a draft follow its traffic, and what does it forget?"
FROZEN, OURS, ONLINE, SCRATCH, POOL = "frozen", "redraft", "online distillation", "from scratch", "pool"
ONLINE_REQUESTS, ONLINE_RATE = 8, 1e-4
NEAR = 0.9  # of the specialist's τ
WEIGHTS, STATE = "draft", "state.safetensors"

Row = dict[str, Any]


class Stream(NamedTuple):
    """What is asked, window by window, and what drafts are held to.

    Of the windows the first `num_shifted` are of the further domain, `shifted`, and the others of `known`, which
    returns. `more` requests of the further domain only the specialist learns; those held out are of all domains.
    """

    shifted: str
    known: str
    windows: list[list[Sample]]
    num_shifted: int
    more: list[Sample]
    held_out: list[Sample]

    def learnt(self, window: int) -> list[Sample]:
        """Return the requests up to the end of a window, counted from 1."""
        return [sample for part in self.windows[:window] for sample in part]


def measure(run: Run, data: str, num_requests: int, num_windows: int, num_back: int, num_prompts: int) -> Report:
    """Let traffic shift and return, and follow it in every way.

    `data` is the further domain and its prompts, such as "math=prompts.jsonl". ValueError if nothing was built or
    logged, the file is not there, or a domain has too few prompts; RuntimeError if a command failed.
    """
    served = run.served().champion
    run.logged().close()
    pair = first_pair(run.settings)
    target_dir, champion = open_artifact(pair.target_files), open_artifact(files_of(run.settings, "draft", served))
    stream = _stream(run, pair, data, num_requests, num_windows, num_back, num_prompts)
    lab = _Lab(run, target_dir, champion, stream)
    steps = range(1, len(stream.windows) + 1)
    start = run.cells.keep("start", lambda: lab.scored(champion, 0.0))
    specialist = run.cells.keep("specialist", lab.specialist)
    past = [open_artifact(files_of(run.settings, "draft", number)) for number in range(1, served)]
    follow: dict[str, Callable[[int], Row]] = {
        OURS: lambda step: lab.ours(step, served),
        ONLINE: lab.online,
        SCRATCH: lab.scratch,
        POOL: lambda step: lab.pool(step, past),
    }
    rows = {FROZEN: [start for _ in steps]} | {
        way: [run.cells.keep(f"{way.replace(' ', '-')}-{step}", lambda: after(step)) for step in steps]  # noqa: B023
        for way, after in follow.items()
    }
    return make_report(start, specialist, rows, stream, num_requests, run.folder / "drift.png")


def _stream(
    run: Run, pair: Pair, data: str, num_requests: int, num_windows: int, num_back: int, num_prompts: int
) -> Stream:
    """Draw prompts and let the target answer; those of the recipe's domains that it asks itself are left out."""
    seed, known = run.recipe.seed, run.recipe.demo.new_domain if run.recipe.demo else run.recipe.first_domains[0]
    num_shifted = num_requests * num_windows
    shifted, table = file_traffic(data, 2 * num_shifted, 2 * num_prompts)
    tables = {**run.recipe.traffic, shifted: table}
    new = choose_more(shifted, table, seed, "requests", 2 * num_shifted)
    asked = tables[known].num_requests
    old = choose_more(known, tables[known], seed, "requests", asked + num_requests * num_back)[asked:]
    held_out = [
        prompt for domain, of in tables.items() for prompt in choose_more(domain, of, seed, "held_out", num_prompts)
    ]
    found = {one.id: one for one in answers(run, pair.target_files, [*new, *old, *held_out], "answers")}
    requests = [found[prompt.id] for prompt in [*new[:num_shifted], *old]]
    return Stream(
        shifted=shifted,
        known=known,
        windows=[requests[place : place + num_requests] for place in range(0, len(requests), num_requests)],
        num_shifted=num_windows,
        more=[found[prompt.id] for prompt in new[num_shifted:]],
        held_out=[found[prompt.id] for prompt in held_out],
    )


class _Lab:
    def __init__(self, run: Run, target_dir: Path, champion: Path, stream: Stream) -> None:
        self._run, self._target_dir, self._champion, self._stream = run, target_dir, champion, stream
        self._params = run.recipe.refresh_distill()

    def scored(self, draft_dir: Path, seconds: float, samples: Sequence[Sample] | None = None) -> Row:
        """Return what a draft accepts of held-out answers, or of others, and how long it took to make it."""
        recipe = self._run.recipe
        with self._run.bar(f"acceptance of {draft_dir.name}", 1) as bar:
            traces = trace(
                open_draft(draft_dir, self._target_dir),
                self._target_dir,
                self._stream.held_out if samples is None else samples,
                recipe.num_draft_tokens,
                self._run.folder / "states" / ("held-out" if samples is None else "window"),
                self._run.settings.device,
                recipe.engine.rules.greedy,
            )
            bar.advance()
        return {"traces": [one.model_dump(mode="json") for one in traces], "seconds": round(seconds, 1)}

    def ours(self, step: int, served: int) -> Row:
        """Log a window and refresh; what the registry then says serves."""
        run = self._run
        file = run.folder / "windows" / f"{step}.jsonl"
        file.parent.mkdir(exist_ok=True)
        rows = [
            {"prompt_ids": one.prompt_ids, "completion_ids": one.completion_ids, "domain": one.domain, "temperature": 0}
            for one in self._stream.windows[step - 1]
        ]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        run.command("import-logs", str(file), "--recipe", run.recipe_name)
        newest = served if step == 1 else run.cells.read(f"{OURS}-{step - 1}")["newest"]
        made = refresh(run, newest)
        champion = open_registry(run.settings).champion("draft")
        assert champion is not None
        row = self.scored(open_artifact(files_of(run.settings, "draft", champion.number)), made["seconds"])
        return {
            **row,
            "newest": made["newest"],
            "champion": champion.number,
            "verdict": "too few rows" if made["gate"] is None else made["gate"]["verdict"],
        }

    def online(self, step: int) -> Row:
        """Go on with the draft of the window before, eight requests at a time."""
        before, after = (self._run.folder / "online" / f"{number}" for number in (step - 1, step))
        rmtree(after, ignore_errors=True)
        after.mkdir(parents=True)
        requests, started_s = self._stream.windows[step - 1], time.monotonic()
        changed = {
            "learning_rate": ONLINE_RATE,
            "warmup": 0.0,
            "schedule": "constant",
            "average": 0.0,
            "num_epochs": 1,
            "batch_tokens": sum(len(one.prompt_ids) + len(one.completion_ids) for one in requests),
        }
        start, state = (before / WEIGHTS, before / STATE) if step > 1 else (self._champion, None)
        draft = untrained(self._run.recipe.draft, start, self._target_dir, requests)
        for place in range(0, len(requests), ONLINE_REQUESTS):
            part = requests[place : place + ONLINE_REQUESTS]
            self._train(draft, part, self._params.model_copy(update=changed), after / "work", state, after / STATE)
            state = after / STATE
        return self._saved(draft, after / WEIGHTS, time.monotonic() - started_s)

    def scratch(self, step: int) -> Row:
        return self._made(f"scratch/{step}", None, self._stream.learnt(step), self._run.recipe.distill)

    def pool(self, step: int, past: Sequence[Path]) -> Row:
        started_s, window = time.monotonic(), self._stream.windows[step - 1]
        taus = {
            draft_dir: mean_accepted_length(_traces(self.scored(draft_dir, 0.0, window)))
            for draft_dir in (*past, self._champion)
        }
        return self.scored(max(taus, key=taus.__getitem__), time.monotonic() - started_s)

    def specialist(self) -> Row:
        """Let the served draft learn the further domain only, and twice as much of it."""
        stream, params = self._stream, self._params
        assert isinstance(params, distill.Params)  # which a recipe's fields can't say without importing torch
        longer = params.model_copy(update={"num_epochs": 2 * params.num_epochs})
        return self._made("specialist", self._champion, [*stream.learnt(stream.num_shifted), *stream.more], longer)

    def _made(self, name: str, start: Path | None, requests: Sequence[Sample], params: Any) -> Row:
        """Let a draft learn requests, a new one or one that goes on from another, and score it."""
        started_s, work = time.monotonic(), self._run.folder / name
        draft = untrained(self._run.recipe.draft, start, self._target_dir, requests)
        self._train(draft, requests, params, work / "work")
        return self._saved(draft, work / WEIGHTS, time.monotonic() - started_s)

    def _train(
        self,
        draft: Draft,
        samples: Sequence[Sample],
        params: Any,
        work: Path,
        state: Path | None = None,
        state_out: Path | None = None,
    ) -> None:
        run = self._run
        with run.bar(f"training on {len(samples)} requests", 1) as bar:
            distill.train(
                draft,
                self._target_dir,
                samples,
                params,
                run.recipe.num_draft_tokens,
                work,
                run.recipe.seed,
                device=run.settings.device,
                state=state,
                state_out=state_out,
                teacher_dirs=[open_artifact(one) for one in prepare_teachers(params)],
            )
            bar.advance()
        rmtree(work)

    def _saved(self, draft: Draft, directory: Path, seconds: float) -> Row:
        """Score a draft with the weights as rounded as they are served."""
        directory.mkdir(parents=True, exist_ok=True)
        family_of(self._champion).save(draft, directory)
        return self.scored(directory, seconds)


def answers(
    run: Run, target: Artifact, prompts: Sequence[Prompt], cell: str, max_tokens: int | None = None
) -> list[Sample]:
    """Let the target answer, in the order of the prompts, into a cell; an interrupted run asks only for the rest."""
    generate = run.recipe.generate.model_copy(update={} if max_tokens is None else {"max_tokens": max_tokens})

    async def answer() -> dict[str, Sample]:
        directory = open_artifact(target)
        async with open_engine(directory, run.recipe.engine) as engine:
            encoder = ChatEncoder.of(AutoTokenizer.from_pretrained(directory))
            return await answer_prompts(engine, encoder, prompts, generate, run.folder / ANSWERS)

    def ask() -> list[dict[str, object]]:
        found = asyncio.run(answer())
        gc.collect()  # the engine is in reference cycles, and complains if it is still there when Python ends
        return [found[prompt.id]._replace(domain=prompt.domain)._asdict() for prompt in prompts]

    return [Sample(**row) for row in run.cells.keep(cell, ask)]


def file_traffic(given: str, num_requests: int, num_held_out: int) -> tuple[str, Traffic]:
    """Return a domain and its prompts out of "domain=file"; ValueError if it is none, or the file is not there.

    Those that are held out are never asked; which share of the file either has is drawn, and varies a little.
    """
    domain, _, path = given.partition("=")
    if not domain or not path:
        raise ValueError(f"{given!r} names no domain and file, such as math=prompts.jsonl")
    if not Path(path).is_file():
        raise ValueError(f'domain "{domain}": there is no file {path}; leave it out to go on without that domain')
    source = catalog.parse("sources", {"name": "dataset", "path": path, "domain": domain})
    assert isinstance(source, dataset.Params)
    return domain, Traffic(source=source, num_held_out=num_held_out, num_requests=num_requests)


def refresh(run: Run, newest: int) -> Row:
    """Refresh as a person would; what one that was interrupted has registered counts. RuntimeError if it fails.

    Returns seconds, the newest version now, and what the gate said of it, None if no draft was made.
    """
    started_s = time.monotonic()
    run.command("refresh", "--recipe", run.recipe_name)
    registry = open_registry(run.settings)
    made = registry.versions("draft")[0]
    told = registry.attached(made, DATA) if made.number > newest else None
    return {
        "seconds": round(time.monotonic() - started_s, 1),
        "newest": made.number,
        "gate": None if told is None else GateReport.model_validate_json(told).model_dump(mode="json"),
    }


def _traces(row: Row, domain: str = "") -> list[Trace]:
    return [Trace.model_validate(one) for one in row["traces"] if domain in ("", one["domain"])]


def make_report(
    start: Row, specialist: Row, rows: Mapping[str, Sequence[Row]], stream: Stream, num_requests: int, picture: Path
) -> Report:
    """Say when each way came near the specialist, and what was left of the other domains."""
    domains = [domain for domain in dict.fromkeys(one["domain"] for one in start["traces"]) if domain != stream.shifted]
    before, best = _tau(start, stream.shifted), _tau(specialist, stream.shifted)
    found = {way: _followed(of_way, start, best, stream, num_requests, domains) for way, of_way in rows.items()}
    marks = ["before", *(f"{num_requests * step}" for step in range(1, stream.num_shifted + 1))]
    taus = {
        way: [_tau(row, stream.shifted) for row in (start, *of_way[: stream.num_shifted])]
        for way, of_way in rows.items()
    }
    columns = [
        f"τ {stream.shifted} after {num_requests * stream.num_shifted} requests",
        "requests to 90%",
        "seconds of work until then",
        *(f"τ {domain}, change" for domain in domains),
        f"τ {stream.known} when it is back",
    ]
    return Report(
        figures={
            "shifted": stream.shifted,
            "known": stream.known,
            "start": {domain: _tau(start, domain).model_dump() for domain in (stream.shifted, *domains)},
            "specialist": {**best.model_dump(), "seconds": specialist["seconds"]},
            "ways": found,
        },
        grids=[Grid("after the shift", ["", *columns], [[way, *_cells(one, domains)] for way, one in found.items()])],
        notes=[
            (
                f"τ {stream.shifted} of the served draft before the shift {interval(before.model_dump())}, "
                f"of the specialist {interval(best.model_dump())}."
            ),
            f"What became of redraft's windows: {', '.join(row['verdict'] for row in rows[OURS])}.",
        ],
        picture=draw_refreshes(taus, marks, picture),
    )


def _tau(row: Row, domain: str) -> Estimate:
    tau = summarise(_traces(row, domain)).tau
    assert tau is not None  # no trace is without a step
    return tau


def _followed(
    rows: Sequence[Row], start: Row, best: Estimate, stream: Stream, num_requests: int, domains: Sequence[str]
) -> Row:
    """Return what a way made of the stream; `near` is None if it did not come near."""
    shifted = rows[: stream.num_shifted]
    near = [step for step, row in enumerate(shifted, start=1) if _tau(row, stream.shifted).value >= NEAR * best.value]
    last = shifted[-1]
    return {
        "tau": _tau(last, stream.shifted).model_dump(),
        "near": {
            "requests": near[0] * num_requests,
            "seconds": round(sum(row["seconds"] for row in shifted[: near[0]]), 1),
        }
        if near
        else None,
        "changes": {
            domain: difference(_traces(start, domain), _traces(last, domain)).model_dump() for domain in domains
        },
        "before": {domain: _tau(start, domain).value for domain in domains},
        "back": _tau(rows[-1], stream.known).model_dump(),
    }


def _cells(one: Row, domains: Sequence[str]) -> list[str]:
    near, changes = one["near"], (one["changes"][domain] for domain in domains)
    return [
        interval(one["tau"]),
        "–" if near is None else f"{near['requests']}",
        "–" if near is None else f"{near['seconds']:.0f}",
        *(f"{change['value']:+.3f} ({change['low']:+.3f} to {change['high']:+.3f})" for change in changes),
        interval(one["back"]),
    ]
