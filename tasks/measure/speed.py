"""B1: how fast the served pair is at one stream, against everything that could serve the target instead.

The endpoints (the pair, vLLM without a draft, vLLM's own prompt lookup) and the process of the offline peers follow
each other in rounds, every other round in reverse. Within the pair's endpoint speculation is switched on and off prompt
by prompt, and the first draft takes its turn once a round. Ratios are paired by prompt. The offline peers have no HTTP
on their way, which is to their advantage. The reference engine without a draft is among them, so that its distance to
vLLM without a draft is known, whatever drafting does for either.

The speed of decoding leaves the first token out, and so trusts the moment at which it came. On few cores tokens can be
held up on their way and come in a bunch, which makes decoding look faster than it was; so whole requests are compared
too, from sending to the last token, and no bunch can flatter those.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from infra.registry import Registry, open_registry
from infra.views.figures import draw_speeds
from infra.views.results import Grid, Report, interval, spread
from models.sources import Prompt
from tasks.measure.compare_traffic import judge_outputs
from tasks.measure.endpoint import Endpoint, dump
from tasks.measure.home import Served
from tasks.measure.latency import Decoded, compare_speed, decoded, inter_token_spans, percentile
from tasks.measure.latency import spread as spread_of
from tasks.measure.offline import Job, run_offline
from tasks.measure.peers import UNDRAFTED, engine_dtype, ngram_speculation
from tasks.measure.run import Bar, Run
from tasks.promote import open_champions

TITLE, QUESTION = "B1", "is the served pair faster?"
PAIR, OFF, FIRST = "served pair", "served pair, speculation off", "first draft"
ALONE, NGRAM, REFERENCE = "vLLM without a draft", "vLLM ngram", "reference"
OVER_ALONE = ("over_alone", "request_over_alone")
AIM = 2.0

Row = dict[str, Any]


class Stage(NamedTuple):
    """A round's share of the prompts, and where they are asked."""

    run: Run
    served: Served
    prompts: Sequence[Prompt]
    bar: Bar

    def ask(self, endpoint: Endpoint, side: str, prompts: Sequence[Prompt], gaps: bool = False) -> list[Row]:
        """Ask prompts one after the other and return the answers as rows of a side."""
        rows: list[Row] = []
        for prompt in prompts:  # a connection each, so that no side has older ones
            rows += dump(endpoint.ask([prompt], gaps=gaps, on_answer=self.bar.advance))
        return [{"side": side, **row} for row in rows]

    @property
    def registry(self) -> Registry:
        """The benchmark's own."""
        return open_registry(self.run.settings)


def measure(run: Run, num_prompts: int, num_rounds: int) -> Report:
    """Measure every side on the same held-out prompts.

    Args:
        run: the benchmark.
        num_prompts: of each domain.
        num_rounds: how often the sides take turns; each round has its share of the prompts.

    Raises:
        ValueError: nothing was built, or the recipe has fewer prompts.
        RuntimeError: a request failed, or a side could not be started.
    """
    served = run.served()
    prompts = run.prompts("held_out", num_prompts)
    num_rounds = min(num_rounds, num_prompts)
    rows: list[Row] = []
    for number in range(num_rounds):
        share = prompts[number::num_rounds]
        hosts = list(HOSTS)
        for host in hosts if number % 2 == 0 else hosts[::-1]:
            title = f"round {number + 1} of {num_rounds}, {host}"
            rows += run.cells.keep(f"{number}-{host}", lambda: _ask(run, served, share, host, title))  # noqa: B023
    _require_answers(rows)
    return _report(run, served, rows)


def _ask(run: Run, served: Served, prompts: Sequence[Prompt], host: str, title: str) -> list[Row]:
    ask, num_sides = HOSTS[host]
    if host == "pair" and served.champion == 1:
        num_sides -= 1
    with run.bar(title, num_sides * len(prompts)) as bar:
        return ask(Stage(run, served, prompts, bar))


def _endpoint(stage: Stage, changed: Mapping[str, Any], **extra: Any) -> Endpoint:
    """Return a service.

    Args:
        stage: what is served.
        changed: keys of the service's configuration.
        extra: further arguments of the engine.
    """
    engine = stage.run.recipe.engine.model_dump(mode="json")
    if "speculative_config" in extra:
        engine["num_draft_tokens"] = 0
    engine["extra"] = {**engine["extra"], **extra}
    return Endpoint(stage.run.recipe, stage.run.settings, {**changed, "engine": engine})


def _pair(stage: Stage) -> list[Row]:
    """Ask the served pair with and without speculation in turn, then with the first draft, if that is another.

    Switching speculation on empties the prefix cache, so the pair always reads a prompt anew; without speculation a
    long one may be found there, where the pair was asked first.
    """
    stage.registry.promote("draft", stage.served.champion)
    rows: list[Row] = []
    with _endpoint(stage, {}) as endpoint:
        endpoint.wait_for_draft(stage.served.champion)
        _warm(endpoint, stage)
        for number, prompt in enumerate(stage.prompts):
            for side in (PAIR, OFF) if number % 2 == 0 else (OFF, PAIR):
                endpoint.speculate(side == PAIR)
                rows += stage.ask(endpoint, side, [prompt])
        endpoint.speculate(True)
        if stage.served.champion > 1:
            stage.registry.promote("draft", 1)
            endpoint.wait_for_draft(1)
            rows += stage.ask(endpoint, FIRST, stage.prompts)
    stage.registry.promote("draft", stage.served.champion)
    return rows


def _alone(stage: Stage) -> list[Row]:
    """Ask vLLM that was started without a draft; the outputs that all others are held to are recorded here."""
    with _endpoint(stage, {"follow_drafts": False}) as endpoint:
        _warm(endpoint, stage)
        rows = stage.ask(endpoint, ALONE, stage.prompts)
        return rows + stage.ask(endpoint, REFERENCE, stage.prompts, gaps=True)


def _ngram(stage: Stage) -> list[Row]:
    """Ask vLLM that drafts by its own prompt lookup."""
    speculation = ngram_speculation(stage.run.recipe.num_draft_tokens)
    with _endpoint(stage, {"follow_drafts": False}, speculative_config=speculation) as endpoint:
        _warm(endpoint, stage)
        return stage.ask(endpoint, NGRAM, stage.prompts)


def _offline(stage: Stage) -> list[Row]:
    """Ask the peers that have no endpoint."""
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
    answers = run_offline(job, folder, stage.bar)
    return [{"side": side, **row} for side, answer in answers for row in dump([answer])]


# What is started for the sides that are asked there, and their number.
HOSTS: Mapping[str, tuple[Callable[[Stage], list[Row]], int]] = {
    "pair": (_pair, 3),
    "alone": (_alone, 2),
    "ngram": (_ngram, 1),
    "offline": (_offline, 4),
}


def _warm(endpoint: Endpoint, stage: Stage) -> None:
    endpoint.ask(stage.run.prompts("requests", 1))


def _require_answers(rows: Sequence[Row]) -> None:
    failed = Counter(f"{row['side']}: {row['status']}" for row in rows if row["status"] != "ok")
    if failed:
        raise RuntimeError(f"{failed.total()} of {len(rows)} requests failed: {dict(failed)}")


def _report(run: Run, served: Served, rows: Sequence[Row]) -> Report:
    target_dir = open_champions.fn().target_files.path
    domains = list(run.recipe.traffic)
    figures, grids, failures = {}, [], []
    for domain in domains:
        of = {side: [row for row in rows if (row["side"], row["domain"]) == (side, domain)] for side in _sides(rows)}
        references = of.pop(REFERENCE)
        sides = {side: _Side(answers, judge_outputs(references, answers, target_dir)) for side, answers in of.items()}
        figures[domain] = {side: one.figures(sides[ALONE], sides[PAIR], run.recipe.seed) for side, one in sides.items()}
        grids.append(_grid(domain, figures[domain]))
        failures += [
            f"{domain}, {side}: {one.verdicts['different']} outputs differ from vLLM's without a draft"
            for side, one in sides.items()
            if one.verdicts["different"] and side in (PAIR, OFF, FIRST, NGRAM)
        ]
    notes = [
        f"One stream, greedy, K = {run.recipe.num_draft_tokens} everywhere; first token left out.",
        f"Draft {served.originals[-1]} is served; the first draft is {served.originals[0]}.",
        "Outputs are held to those of vLLM without a draft; speeds are only of prompts whose output passed.",
        "Alone is vLLM without a draft. In brackets p10 to p90 over prompts.",
        "The last column is over all tokens and seconds, with a 95% interval that resamples prompts.",
        "Assisted generation of transformers is its prompt lookup: no small model with this tokenizer is at hand.",
        "The reference engine does not tell when each token came, so it has no inter-token latency.",
    ]
    if served.champion == 1:
        notes.append("The served draft is the first one, so there is no static draft to compare with.")
    picture = draw_speeds(_speeds(figures), "tokens/s, one stream", run.folder / "speed.png")
    return Report(
        figures={"domains": figures, "drafts": list(served.originals)},
        grids=grids,
        notes=notes,
        verdict=judge(figures),
        failures=failures,
        picture=picture,
    )


class _Side:
    """One side's answers to one domain's prompts."""

    def __init__(self, rows: Sequence[Row], judged: Mapping[str, str]) -> None:
        self.verdicts = Counter(judged.values())
        self.rows = [row for row in rows if judged[row["prompt_id"]] != "different"]
        found = {row["prompt_id"]: _decoded(row) for row in self.rows}
        self.decoded: dict[str, Decoded] = {prompt: one for prompt, one in found.items() if one is not None}
        self.requests = {row["prompt_id"]: Decoded(row["num_tokens"], _last_s(row)) for row in self.rows}

    def speeds(self) -> list[float]:
        """Tokens/s, prompt by prompt."""
        return [one.num_tokens / one.seconds for one in self.decoded.values()]

    def figures(self, alone: "_Side", pair: "_Side", seed: int) -> Row:
        """Return this side's figures, and how it stands to vLLM without a draft and to the served pair."""
        steps = [len(row["accepted_per_step"] or ()) for row in self.rows]
        accepted = [sum(row["accepted_per_step"] or ()) for row in self.rows]
        spans = [span for row in self.rows for span in inter_token_spans(0.0, row["arrival_ms"])]
        inter_token_ms = [1000 * (end - start) for start, end in spans]
        ratios = {
            "over_alone": compare_speed(self.decoded, alone.decoded, seed),
            "request_over_alone": compare_speed(self.requests, alone.requests, seed),
            "pair_over_it": compare_speed(pair.decoded, self.decoded, seed),
        }
        return {
            "outputs": dict(self.verdicts),
            "num_prompts": len(self.decoded),
            "tokens_per_s": spread_of(self.speeds()).model_dump() if self.decoded else None,
            "inter_token_ms": {f"p{p}": percentile(inter_token_ms, p) for p in (50, 99)} if inter_token_ms else None,
            "tau": 1 + sum(accepted) / sum(steps) if sum(steps) else None,
            **{name: ratio.model_dump() if ratio else None for name, ratio in ratios.items()},
        }


def _speeds(figures: Mapping[str, Mapping[str, Row]]) -> dict[str, dict[str, tuple[float, float, float]]]:
    """Return domain to side to median, p10 and p90 of the tokens/s."""
    speeds: dict[str, dict[str, tuple[float, float, float]]] = {}
    for domain, sides in figures.items():
        found = {side: one["tokens_per_s"] for side, one in sides.items() if one["tokens_per_s"]}
        speeds[domain] = {side: (one["median"], one["p10"], one["p90"]) for side, one in found.items()}
    return speeds


def _decoded(row: Row) -> Decoded | None:
    """Return what decoding took, from the arrivals or, where a peer tells only the ends, from those."""
    if row["arrival_ms"]:
        return decoded(row["arrival_ms"])
    seconds = row["seconds"] - row["first_token_ms"] / 1000
    return Decoded(row["num_tokens"] - 1, seconds) if row["num_tokens"] > 1 and seconds > 0 else None


def _last_s(row: Row) -> float:
    """Return the seconds from sending to the last token."""
    return float(row["arrival_ms"][-1] / 1000 if row["arrival_ms"] else row["seconds"])


def _sides(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(row["side"] for row in rows))


def _grid(domain: str, figures: Mapping[str, Row]) -> Grid:
    columns = ["side", "outputs", "tokens/s", "p50 ms", "p99 ms", "τ", "× alone", "whole request × alone", "pair ÷ it"]
    rows = []
    for side, one in figures.items():
        if one["tokens_per_s"] is None:
            rows.append([side, _outputs(one), *["none"] * 7])
            continue
        itl, pair = one["inter_token_ms"], one["pair_over_it"]
        rows.append(
            [
                side,
                _outputs(one),
                spread(one["tokens_per_s"]),
                *(f"{itl[p]:.1f}" if itl else "–" for p in ("p50", "p99")),
                f"{one['tau']:.2f}" if one["tau"] else "–",
                *(spread(one[name]["prompts"], 2) if one[name] else "none" for name in OVER_ALONE),
                interval(pair["overall"]) if pair else "none",
            ]
        )
    return Grid(f"{domain}, held-out prompts", columns, rows)


def _outputs(figures: Row) -> str:
    counts = figures["outputs"]
    return ", ".join(
        f"{counts[verdict]} {verdict}" for verdict in ("equal", "near-tie", "different") if counts.get(verdict)
    )


def judge(figures: Mapping[str, Mapping[str, Row]]) -> str:
    """Say how the pair, and the reference engine without a draft, stand to vLLM without a draft.

    Args:
        figures: domain to side to what `_Side.figures` gave.
    """
    parts = []
    for domain, sides in figures.items():
        own, request = (sides[PAIR][name] for name in OVER_ALONE)
        if own is None or request is None:
            parts.append(f"{domain}: no output of the pair could be compared")
            continue
        behind = [
            side
            for side, one in sides.items()
            if side != PAIR and one["pair_over_it"] and one["pair_over_it"]["overall"]["value"] < 1
        ]
        parts.append(
            f"{domain}: {own['overall']['value']:.2f}× vLLM without a draft (aim {AIM:g}), "
            f"{request['overall']['value']:.2f}× over whole requests, "
            + (f"behind {', '.join(behind)}" if behind else "ahead of every peer")
        )
    for domain, sides in figures.items():
        ratio = sides[UNDRAFTED]["over_alone"]
        found = f"{interval(ratio['overall'])} of vLLM's speed" if ratio else "no output could be compared"
        parts.append(f"{domain}, {UNDRAFTED}: {found}")
    return "; ".join(parts) + "."
