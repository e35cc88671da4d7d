"""How fast the served pair is at one stream, against everything that could serve the target instead.

The baseline is what a user would run who had no redraft: vLLM's own endpoint, compiled, without a draft. It, the ways
in which it drafts by itself, the served pair's endpoint and the offline baselines follow each other in rounds, every
other round in reverse. Within the pair's endpoint speculation is switched on and off prompt by prompt, and the first
draft takes its turn once a round. Ratios are paired by prompt. The offline baselines have no HTTP on their way, which
is to their advantage.

The speed of decoding leaves the first token out, and so trusts the moment at which it came. On few cores tokens can be
held up on their way and come in a bunch, which makes decoding look faster than it was; so whole requests are compared
too, from sending to the last token, and no bunch can flatter those.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from infra.machine import SUFFIX_PACKAGE, suffix_version
from infra.registry import open_registry
from infra.settings import load_settings
from infra.views.figures import draw_speeds
from infra.views.results import Grid, Report, interval, spread
from models.core.evaluation.latency import Decoded, compare_speed, decoded, inter_token_spans, percentile
from models.core.evaluation.latency import spread as spread_of
from models.core.layers.kernels import engine_dtype
from models.core.layers.quantized_weights import FILE as GRID
from models.params import did_you_mean
from models.sources import Prompt
from tasks.measure.baselines import LLAMACPP, SIDES, Job, run_llamacpp, run_offline, why_not
from tasks.measure.compare_traffic import output_verdicts
from tasks.measure.endpoint import ChatServer, Endpoint, dump, require_answers
from tasks.measure.run import Bar, Run, Served
from tasks.measure.stock import PLAIN, SUFFIX, Stock, speculations
from tasks.promote import open_champions

QUESTION = "is the served pair faster?"
PAIR, OFF, FIRST = "served pair", "served pair, speculation off", "first draft"
REFERENCE = "reference"
OURS = "pair"  # what is started for the pair
UNHELD = "not held to them"  # the verdict on an output of other number formats
# Of each domain before the pair is timed: of a domain's first requests most are drafted head-only.
NUM_WARM = 24

Row = dict[str, Any]


class Stage(NamedTuple):
    run: Run
    served: Served
    prompts: Sequence[Prompt]
    bar: Bar

    def ask(self, endpoint: ChatServer, side: str, prompts: Sequence[Prompt], gaps: bool = False) -> list[Row]:
        return [
            {"side": side, **row}
            for prompt in prompts  # a connection each, so that no side has older ones
            for row in dump(endpoint.ask([prompt], gaps=gaps, on_answer=self.bar.advance))
        ]


def measure(run: Run, num_prompts: int, num_rounds: int, baselines: Sequence[str] = ()) -> Report:
    """Measure every side on its share of each domain's held-out prompts a round, all baselines if none is named.

    ValueError if nothing was built, the recipe has fewer prompts, or there is no such baseline; RuntimeError if a
    request failed, or a side could not be started.
    """
    served = run.served()
    prompts = run.prompts("held_out", num_prompts)
    num_rounds = min(num_rounds, num_prompts)
    rows: list[Row] = []
    ways = speculations(run.recipe.num_draft_tokens, served, run.settings)
    every = {
        OURS: _Host(_pair, 3 if served.champion > 1 else 2),
        PLAIN: _Host(partial(_stock, PLAIN, None), 2),
        **{side: _Host(partial(_stock, side, way), 1) for side, way in ways.items()},
        "offline": _Host(_offline, 4),
        **({} if why_not(run.recipe) else {LLAMACPP: _Host(_llamacpp, len(SIDES))}),
    }
    hosts = _chosen(every, baselines)
    for number in range(num_rounds):
        share = prompts[number::num_rounds]
        for name in list(hosts) if number % 2 == 0 else list(hosts)[::-1]:
            title, cell = f"round {number + 1} of {num_rounds}, {name}", f"{number}-{name.replace(' ', '-')}"
            rows += run.cells.keep(cell, lambda: _ask(run, served, share, hosts[name], title))  # noqa: B023
    require_answers(rows)
    return _report(run, served, rows)


class _Host(NamedTuple):
    """What is started for the sides that are asked there, and their number."""

    ask: Callable[[Stage], list[Row]]
    num_sides: int


def _chosen(hosts: dict[str, _Host], baselines: Sequence[str]) -> dict[str, _Host]:
    """Return the pair, plain vLLM and the baselines that are named, or all; ValueError if there is no such baseline."""
    others = [name for name in hosts if name not in (OURS, PLAIN)]
    for name in baselines:
        if name not in others:
            raise ValueError(f'no baseline "{name}"{did_you_mean(name, others)}')
    return {name: host for name, host in hosts.items() if not baselines or name not in others or name in baselines}


def _ask(run: Run, served: Served, prompts: Sequence[Prompt], host: _Host, title: str) -> list[Row]:
    with run.bar(title, host.num_sides * len(prompts)) as bar:
        return host.ask(Stage(run, served, prompts, bar))


def _pair(stage: Stage) -> list[Row]:
    """Ask the served pair with and without speculation in turn, then with the first draft, if that is another.

    Before each answer speculation is switched on anew, which empties the prefix cache: a prompt is read alike by both.
    """
    run, champion = stage.run, stage.served.champion
    rows: list[Row] = []
    registry = open_registry(run.settings)
    registry.promote("draft", champion)
    with Endpoint(run.recipe, run.settings) as endpoint:
        endpoint.wait_for_draft(champion)
        endpoint.ask(run.warming(NUM_WARM))
        for number, prompt in enumerate(stage.prompts):
            for side in (PAIR, OFF) if number % 2 == 0 else (OFF, PAIR):
                endpoint.speculate_afresh(side == PAIR)
                rows += stage.ask(endpoint, side, [prompt])
        endpoint.client.speculate(True)
        if champion > 1:
            registry.promote("draft", 1)
            endpoint.wait_for_draft(1)
            endpoint.ask_as_another()  # else the answers of before would be looked up
            rows += stage.ask(endpoint, FIRST, stage.prompts)
    registry.promote("draft", champion)
    return rows


def _stock(side: str, speculation: Mapping[str, Any] | None, stage: Stage) -> list[Row]:
    """Ask vLLM by itself; without a draft, the outputs that all others are held to are recorded too."""
    run, target_dir = stage.run, open_champions.fn().target_files.path
    with Stock(run.recipe, run.settings, target_dir, speculation) as endpoint:
        endpoint.ask(run.warming())
        rows = stage.ask(endpoint, side, stage.prompts)
        return rows if speculation else rows + stage.ask(endpoint, REFERENCE, stage.prompts, gaps=True)


def _offline(stage: Stage) -> list[Row]:
    run, pair = stage.run, open_champions.fn()
    folder = run.folder / "offline"
    job = Job(
        target_dir=pair.target_files.path,
        draft_dir=pair.draft_files.path,
        dtype=engine_dtype(run.recipe.engine, run.settings.device),
        num_draft_tokens=run.recipe.num_draft_tokens,
        max_model_len=run.recipe.engine.max_model_len,
        max_tokens=run.recipe.generate.max_tokens,
        prompts=tuple(stage.prompts),
        answers=folder / "answers.jsonl",
    )
    return run_offline(job, folder, stage.bar)


def _llamacpp(stage: Stage) -> list[Row]:
    run, target_dir = stage.run, open_champions.fn().target_files.path
    return run_llamacpp(run.recipe, target_dir, stage.prompts, run.folder / "llamacpp", stage.bar)


def _report(run: Run, served: Served, rows: Sequence[Row]) -> Report:
    target_dir = open_champions.fn().target_files.path
    figures, grids, failures = {}, [], []
    for domain in run.recipe.traffic:
        of = {
            side: [row for row in rows if (row["side"], row["domain"]) == (side, domain)]
            for side in dict.fromkeys(row["side"] for row in rows)
        }
        references = of.pop(REFERENCE)
        # The weights of llama.cpp's sides are others, so they are held to nothing.
        verdicts = {
            side: dict.fromkeys((row["prompt_id"] for row in answers), UNHELD)
            if side in SIDES
            else output_verdicts(references, answers, target_dir)
            for side, answers in of.items()
        }
        sides = {side: _Side(answers, verdicts[side]) for side, answers in of.items()}
        figures[domain] = {side: one.figures(sides[PLAIN], sides[PAIR], run.recipe.seed) for side, one in sides.items()}
        grids.append(_grid(domain, figures[domain]))
        failures += [
            f"{domain}, {side}: {one.verdicts['different']} outputs differ from vLLM's without a draft"
            for side, one in sides.items()
            if one.verdicts["different"] and side in (PAIR, OFF, FIRST)
        ]
        if (target_dir / GRID).is_file() and load_settings().device == "cpu":  # else more rows may change a row's bits
            failures += [f"{domain}, {failure}" for failure in unequal(of)]
    missing, compiled = why_not(run.recipe), suffix_version()
    further = {
        f"{SUFFIX} was left out: {SUFFIX_PACKAGE} is not installed; `make baselines` compiles it.": not compiled,
        f"{LLAMACPP} was left out: {missing}.": missing,
        "The served draft is the first one, so there is no static draft to compare with.": served.champion == 1,
    }
    notes = [
        f"One stream, greedy, K = {run.recipe.num_draft_tokens} everywhere; first token left out of tokens/s.",
        f"Draft {served.originals[-1]} is served; the first draft is {served.originals[0]}.",
        f"{PLAIN} is its own OpenAI endpoint, compiled; without a draft it is what speeds and outputs are held to.",
        "Speeds are only of prompts whose output passed. In brackets p10 to p90 over prompts.",
        "The last column is over all tokens and seconds, with a 95% interval that resamples prompts.",
        "The reference engine does not tell when each token came, so it has no inter-token latency.",
        *(note for note, holds in further.items() if holds),
    ]
    speeds = {
        domain: {side: one["tokens_per_s"] for side, one in sides.items() if one["tokens_per_s"]}
        for domain, sides in figures.items()
    }
    return Report(
        figures={"domains": figures, "drafts": list(served.originals)},
        grids=grids,
        notes=notes,
        failures=failures,
        picture=draw_speeds(speeds, "tokens/s, one stream", run.folder / "speed.png"),
    )


def unequal(of: Mapping[str, Sequence[Row]]) -> list[str]:
    """Return as failures how many answers of the pair differ from its own without speculation, by one token even.

    Within one engine and at one stream there are no near ties.
    """
    plain = {row["prompt_id"]: row["token_ids"] for row in of[OFF]}
    counts = {
        side: sum(row["token_ids"] != plain[row["prompt_id"]] for row in of.get(side, ())) for side in (PAIR, FIRST)
    }
    return [f"{side}: {count} outputs are not those with speculation off" for side, count in counts.items() if count]


class _Side:
    def __init__(self, rows: Sequence[Row], verdicts: Mapping[str, str]) -> None:
        self.verdicts = Counter(verdicts.values())
        self.rows = [row for row in rows if verdicts[row["prompt_id"]] != "different"]
        found = {row["prompt_id"]: _decoded(row) for row in self.rows}
        self.decoded: dict[str, Decoded] = {prompt: one for prompt, one in found.items() if one is not None}
        self.requests = {
            row["prompt_id"]: Decoded(
                row["num_tokens"], row["arrival_ms"][-1] / 1000 if row["arrival_ms"] else row["seconds"]
            )
            for row in self.rows
        }  # from sending to the last token

    def figures(self, stock: "_Side", pair: "_Side", seed: int) -> Row:
        """Return this side's figures, and how it stands to vLLM without a draft and to the served pair."""
        counted = [row for row in self.rows if row["accepted_per_step"] is not None]
        accepted = [sum(row["accepted_per_step"]) for row in counted]
        # Where steps that drafted nothing were not counted, each of them brought one token.
        steps = [
            max(len(row["accepted_per_step"]), row["num_tokens"] - 1 - num)
            for row, num in zip(counted, accepted, strict=True)
        ]
        speeds = [one.num_tokens / one.seconds for one in self.decoded.values()]  # prompt by prompt
        first_ms = [row["first_token_ms"] for row in self.rows]
        spans = [span for row in self.rows for span in inter_token_spans(0.0, row["arrival_ms"])]
        inter_token_ms = [1000 * (end - start) for start, end in spans]
        ratios = {
            "over_stock": compare_speed(self.decoded, stock.decoded, seed),
            "request_over_stock": compare_speed(self.requests, stock.requests, seed),
            "pair_over_it": compare_speed(pair.decoded, self.decoded, seed),
        }
        return {
            "outputs": dict(self.verdicts),
            "num_prompts": len(self.decoded),
            "tokens_per_s": spread_of(speeds).model_dump() if speeds else None,
            "first_token_ms": spread_of(first_ms).model_dump() if first_ms else None,
            "inter_token_ms": {f"p{p}": percentile(inter_token_ms, p) for p in (50, 99)} if inter_token_ms else None,
            "tau": 1 + sum(accepted) / sum(steps) if sum(steps) else None,
            **{name: ratio.model_dump() if ratio else None for name, ratio in ratios.items()},
        }


def _decoded(row: Row) -> Decoded | None:
    """Return what decoding took, from the arrivals or, where only the ends are known, from those."""
    if row["arrival_ms"]:
        return decoded(row["arrival_ms"])
    seconds = row["seconds"] - row["first_token_ms"] / 1000
    return Decoded(row["num_tokens"] - 1, seconds) if row["num_tokens"] > 1 and seconds > 0 else None


def _grid(domain: str, figures: Mapping[str, Row]) -> Grid:
    columns = ["side", "outputs", "tokens/s", "first ms", "p50 ms", "p99 ms", "τ"]
    columns += [f"× {PLAIN}", f"whole request × {PLAIN}", "pair ÷ it"]
    return Grid(f"{domain}, held-out prompts", columns, [[side, *_cells(one)] for side, one in figures.items()])


def _cells(one: Row) -> list[str]:
    counts, itl, pair = one["outputs"], one["inter_token_ms"], one["pair_over_it"]
    verdicts = (verdict for verdict in ("equal", "near-tie", "different", UNHELD) if counts.get(verdict))
    outputs = ", ".join(f"{counts[verdict]} {verdict}" for verdict in verdicts)
    if one["tokens_per_s"] is None:
        return [outputs, *["none"] * 8]
    return [
        outputs,
        spread(one["tokens_per_s"]),
        spread(one["first_token_ms"], 0),
        *(f"{itl[p]:.1f}" if itl else "–" for p in ("p50", "p99")),
        f"{one['tau']:.2f}" if one["tau"] else "–",
        *(spread(one[name]["prompts"], 2) if one[name] else "none" for name in ("over_stock", "request_over_stock")),
        interval(pair["overall"]) if pair else "none",
    ]
