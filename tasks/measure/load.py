"""Whether speculation ever loses, at any load and with any draft.

At each number of streams the same prompts are asked with speculation on and off, in blocks that take turns and change
their order from pair to pair; before each block the prefix cache is emptied. A bad draft has noise for weights, the
first one is fresh, the champion is adapted. A block has a key of its own and times no prompt twice, so that no answer
is looked up that the same prompt had before. Streams ask without a pause, so that tokens over the seconds that requests
took, times the streams, is the throughput. They begin one after the other, behind requests of growing length that are
not timed: streams that begin at once and answer at one speed stay in step, as no traffic does, and those that draft
can't. The ratio is of throughputs, paired by block and request. Where vLLM's own endpoint is measured too, its process
can't run beside ours: the same prompts are asked there before or after.
"""

import shutil
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch

from infra.artifacts import write_manifest
from infra.registry import Registry, open_registry
from infra.views.figures import draw_ratios
from infra.views.results import Grid, Report, interval
from models.core.drafting.draft_families import family_of, is_trained, name_of
from models.core.evaluation.latency import Decoded, compare_blocks, compare_percentiles, inter_token_spans, percentile
from models.params import did_you_mean
from models.sources import Prompt
from tasks.measure.compare_traffic import answer_verdicts, differing, record_reference, sentence
from tasks.measure.endpoint import Endpoint, dump, require_answers, undivided
from tasks.measure.run import Run, Served
from tasks.measure.stock import BY_BATCH_SIZE, PLAIN, SERVED_DRAFT, Stock, by_batch_size, speculations
from tasks.promote import open_champions

QUESTION = "does speculation ever lose?"
BAD, FIRST, CHAMPION = DRAFTS = ("bad", "first", "champion")
FLOOR = 0.97  # a line in the picture: below it speculation loses
NUM_WARM = 24  # of each draft and domain before it is timed: of the first requests most are drafted head-only

Row = dict[str, Any]


class _Load(NamedTuple):
    """Who is asked what.

    Attributes:
        prompts: domain to those that are asked in turn.
        primers: domain to those that are asked before them, so that the streams are not in step.
        least: prompts of a block, at least; it has two for each stream, as long as there are so many.
    """

    run: Run
    prompts: Mapping[str, Sequence[Prompt]]
    primers: Mapping[str, Sequence[Prompt]]
    least: int
    num_pairs: int

    def blocks(self, endpoint: Endpoint | Stock, num_streams: int, title: str, ways: Sequence[bool]) -> list[Row]:
        """Ask in all ways, pair by pair, and return the blocks; a way is speculation on or off."""
        size, blocks = min(max(self.least, 2 * num_streams), *map(len, self.prompts.values())), []
        total = size * len(self.prompts) * len(ways) * self.num_pairs
        with self.run.bar(f"{title}, streams: {num_streams}", total) as bar:
            for pair in range(self.num_pairs):
                for domain, prompts in self.prompts.items():
                    for on in ways if pair % 2 == 0 else ways[::-1]:
                        if isinstance(endpoint, Stock):
                            endpoint.forget()
                        else:
                            endpoint.speculate_afresh(on)
                            endpoint.ask_as_another()
                        answers = endpoint.ask(
                            prompts[:size],
                            concurrency=num_streams,
                            on_answer=bar.advance,
                            primers=self.primers[domain],
                        )
                        blocks.append({"domain": domain, "on": on, "answers": dump(answers)})
        return blocks


def measure(
    run: Run, num_prompts: int, streams: Sequence[int], drafts: Sequence[str], num_pairs: int, baselines: Sequence[str]
) -> Report:
    """Measure each draft at each number of streams, ascending, in blocks of each domain's prompts.

    vLLM's own ways are each measured at an endpoint of its own; those that draft are held to PLAIN if that is named.
    ValueError if nothing was built, the recipe has fewer prompts, or there is no such draft or baseline; RuntimeError
    if a request failed, or the service did not take a draft.
    """
    if unknown := [name for name in drafts if name not in DRAFTS]:
        raise ValueError(f'there is no draft "{unknown[0]}"{did_you_mean(unknown[0], DRAFTS)}')
    served = run.served()
    ways: dict[str, Mapping[str, Any] | None] = {}
    if baselines:
        own = speculations(run.recipe.num_draft_tokens, served, run.settings)
        most = getattr(run.recipe.engine, "max_num_seqs", 1)
        ways = {PLAIN: None, **own, BY_BATCH_SIZE: by_batch_size(own[SERVED_DRAFT], most)}
    if unknown := [name for name in baselines if name not in ways]:
        raise ValueError(f'there is no baseline "{unknown[0]}"{did_you_mean(unknown[0], ways)}')
    if served.champion == 1:  # the first draft is the champion
        drafts = list(dict.fromkeys(CHAMPION if name == FIRST else name for name in drafts))
    run.prompts("held_out", num_prompts)  # which a recipe must have at least
    most = max(num_prompts, 2 * max(streams))
    prompts = {domain: found[:most] for domain, found in run.by_domain("held_out").items()}
    load = _Load(run, prompts, run.by_domain("requests"), num_prompts, num_pairs)
    names = dict.fromkeys((*drafts, *baselines))
    cells = {name: {number: f"{name}-{number}" for number in streams} for name in names}
    _ask_service(load, served, {name: cells[name] for name in drafts})
    for name in baselines:
        if not all(map(run.cells.has, cells[name].values())):
            with Stock(run.recipe, run.settings, open_champions.fn().target_files.path, ways[name]) as endpoint:
                endpoint.ask(run.warming(NUM_WARM), concurrency=len(prompts))
                for number, cell in cells[name].items():
                    run.cells.keep(cell, lambda: load.blocks(endpoint, number, name, [name != PLAIN]))  # noqa: B023
    found = {
        name: {number: run.cells.read(cell) for number, cell in of_name.items()} for name, of_name in cells.items()
    }
    return _report(run, served, found, run.cells.read("reference"))


def _ask_service(load: _Load, served: Served, cells: Mapping[str, Mapping[int, str]]) -> None:
    run = load.run
    missing = {name: of_name for name, of_name in cells.items() if not all(map(run.cells.has, of_name.values()))}
    if not missing and run.cells.has("reference"):
        return
    registry, target_dir = open_registry(run.settings), open_champions.fn().target_files.path
    numbers = {FIRST: 1, CHAMPION: served.champion}
    if BAD in missing:
        folder = run.settings.home / "random"
        numbers[BAD] = register_random(registry, served.champion, target_dir, folder, run.recipe.seed)
    registry.promote("draft", served.champion)
    with Endpoint(undivided(run.recipe), run.settings) as endpoint:
        endpoint.wait_for_draft(served.champion)
        for name, of_name in missing.items():
            endpoint.client.speculate(True)
            registry.promote("draft", numbers[name])
            endpoint.wait_for_draft(numbers[name])
            endpoint.ask(run.warming(NUM_WARM), concurrency=len(load.prompts))
            for number, cell in of_name.items():
                run.cells.keep(cell, lambda: load.blocks(endpoint, number, f"{name} draft", [True, False]))  # noqa: B023
        asked = [prompt for prompts in load.prompts.values() for prompt in prompts]
        run.cells.keep("reference", lambda: record_reference(run, endpoint, asked))
    registry.promote("draft", served.champion)


class _Way:
    """The blocks of one draft, number of streams, domain and way, in the order of their pairs."""

    def __init__(self, blocks: Sequence[Row]) -> None:
        self.answers = [row for block in blocks for row in block["answers"]]
        self.requests = [
            {str(place): Decoded(row["num_tokens"], row["arrival_ms"][-1] / 1000) for place, row in enumerate(answers)}
            for answers in (block["answers"] for block in blocks)
        ]
        spans = (inter_token_spans(0.0, row["arrival_ms"]) for row in self.answers)
        self.gaps_ms = [[1000 * (end - start) for start, end in of_answer] for of_answer in spans]

    def figures(self, num_streams: int) -> Row:
        pooled = [ms for gaps in self.gaps_ms for ms in gaps]
        every = [one for block in self.requests for one in block.values()]
        first_ms = [row["first_token_ms"] for row in self.answers]
        return {
            "tokens_per_s": num_streams * sum(one.num_tokens for one in every) / sum(one.seconds for one in every),
            "inter_token_ms": {f"p{p}": percentile(pooled, p) for p in (50, 99)},
            "first_token_ms": {f"p{p}": percentile(first_ms, p) for p in (50, 99)},
        }


def _report(
    run: Run, served: Served, cells: Mapping[str, Mapping[int, Sequence[Row]]], references: list[Row]
) -> Report:
    answers = [
        row for of_name in cells.values() for blocks in of_name.values() for one in blocks for row in one["answers"]
    ]
    require_answers(answers)
    figures: Row = {domain: {name: {} for name in cells} for domain in run.recipe.traffic}
    for domain, (name, of_name) in product(figures, cells.items()):
        for number, blocks in of_name.items():
            of_off = blocks if name in (*DRAFTS, PLAIN) else cells.get(PLAIN, {}).get(number, ())
            on = _Way([one for one in blocks if one["domain"] == domain and one["on"]])
            off = _Way([one for one in of_off if one["domain"] == domain and not one["on"]])
            figures[domain][name][number] = _compare(on, off, number, run.recipe.seed)
    own = [blocks for name, of_name in cells.items() if name in DRAFTS for blocks in of_name.values()]
    ours = [row for blocks in own for one in blocks for row in one["answers"]]
    verdicts = answer_verdicts(references, ours)
    further = {
        "The champion is the first draft.": served.champion == 1,
        f"{PLAIN} is its own endpoint, compiled; each way ran in turn, its ratio is over {PLAIN} without.": any(
            name not in DRAFTS for name in cells
        ),
    }
    notes = [
        f"Greedy, K = {run.recipe.num_draft_tokens} at most; the champion is draft {served.originals[-1]}.",
        "tokens/s are streams × tokens ÷ seconds of the requests, first token included; streams begin one by one.",
        "Ratios are on ÷ off, with a 95% interval that resamples pairs of blocks and the requests in them.",
        sentence(verdicts),
        *(note for note, holds in further.items() if holds),
    ]
    lines = {
        domain: {
            name: [(n, *(one["ratio"][end] for end in ("value", "low", "high"))) for n, one in of_name.items()]
            for name, of_name in of_domain.items()
            if all("ratio" in one for one in of_name.values())
        }
        for domain, of_domain in figures.items()
    }
    return Report(
        figures={"domains": figures, "outputs": dict(verdicts), "drafts": list(served.originals)},
        grids=[_grid(domain, of_domain) for domain, of_domain in figures.items()],
        notes=notes,
        failures=differing(verdicts),
        picture=draw_ratios(lines, FLOOR, "streams", "throughput, on ÷ off", run.folder / "load.png"),
    )


def _compare(on: _Way, off: _Way, num_streams: int, seed: int) -> Row:
    figures = {name: way.figures(num_streams) for name, way in (("on", on), ("off", off)) if way.answers}
    if len(figures) < 2:
        return figures
    return {
        **figures,
        "ratio": compare_blocks(list(zip(on.requests, off.requests, strict=True)), seed).model_dump(),
        "p99_ratio": compare_percentiles(on.gaps_ms, off.gaps_ms, 99, seed).model_dump(),
    }


def _grid(domain: str, figures: Mapping[str, Mapping[int, Row]]) -> Grid:
    columns = ["draft", "streams", "tokens/s on", "off", "on ÷ off", "p50 ms on, off", "p99 ms on, off"]
    columns += ["p99 on ÷ off", "first token p50 ms on, off"]
    rows = []
    for name, of_name in figures.items():
        for number, one in of_name.items():
            ways = [one[way] for way in ("on", "off") if way in one]
            rows.append(
                [
                    name,
                    f"{number}",
                    *(f"{one[way]['tokens_per_s']:.1f}" if way in one else "–" for way in ("on", "off")),
                    interval(one["ratio"]) if "ratio" in one else "–",
                    *(", ".join(f"{way['inter_token_ms'][p]:.1f}" for way in ways) for p in ("p50", "p99")),
                    interval(one["p99_ratio"]) if "p99_ratio" in one else "–",
                    ", ".join(f"{way['first_token_ms']['p50']:.0f}" for way in ways),
                ]
            )
    return Grid(f"{domain}, held-out prompts", columns, rows)


def register_random(registry: Registry, number: int, target_dir: Path, folder: Path, seed: int) -> int:
    """Register a draft with noise of another one's mean and spread for each weight, and return its number.

    It promises nothing on golden prompts, so that a service takes it, and its domains what they promised of the other,
    as where the traffic has changed. The folder is emptied and written first. ValueError if the family has no weights.
    """
    version = registry.get("draft", number)
    files = registry.download(version, folder.with_name(f"{folder.name}-like"))
    family = family_of(files)
    if not is_trained(family):
        raise ValueError(f"a draft of family {name_of(family)} has no weights, so there is no bad one")
    draft, rng = family.load(files, target_dir), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in draft.parameters():
            spread = float(weight.std()) if weight.numel() > 1 else 0.0
            weight.copy_(weight.mean() + spread * torch.randn(weight.shape, generator=rng))
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    family.save(draft, folder)
    write_manifest(folder)
    lineage = version.lineage.model_copy(update={"parent": number, "golden_tau": 1.0})
    return registry.register("draft", folder, lineage.to_tags()).number
