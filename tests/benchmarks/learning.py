"""How a draft grows with the traffic that it learns from.

    python -m tests.benchmarks.learning --size 60 250 --first 0 --seeds 1

Two curves. One is of refreshes: the line's first draft goes on with so many requests of a domain, with the recipe's
settings of a refresh and its replay. The other is of first drafts, made from so many conversations of the recipe's
first domain. The target answers all of them greedily, as the service logs them, and every draft is held to the same
prompts, of groups that no draft learns from. A seed draws which requests come, and in which order they are learnt.

Where lengths of answers are compared, there is a curve for each. A draft then learns as many tokens of answers at each
length, of fewer requests the longer they are, and all are held to answers of the greatest length.

Drafts are trained for the most tokens that they are held to. Nothing is served: acceptance is counted on the target's
own answers (`models.core.evaluation.scoring`).
"""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from infra.artifacts import open_artifact
from infra.versions import Pair
from models.core.drafting.draft_families import open_draft
from models.core.evaluation.acceptance import summarise
from models.core.evaluation.scoring import trace
from models.core.learning.hidden import Sample
from models.recipe import Traffic
from tasks.measure.drift import answers, file_traffic
from tasks.measure.run import Run, first_pair
from tasks.register import first_samples
from tasks.select_data import choose_more
from tasks.stages.samples import draw_per_domain, read_samples
from tests.benchmarks.pupil import teach
from tests.benchmarks.scripts import arguments, open_run, show

SIZES, FIRST_SIZES = [60, 125, 250, 500, 1000, 2000, 4000], [250, 1000, 4000]
REFRESH, FIRST = "refresh", "first draft"
DRAFTED = (3, 5)  # K that every draft is held to
SEEDED = 1000  # requests up to which a size is learnt with several seeds

Row = dict[str, Any]


class Point(NamedTuple):
    """One draft: a refresh with so many requests, or a first draft from so many conversations."""

    kind: str
    size: int
    seed: int

    @property
    def name(self) -> str:
        """Of its cell."""
        return f"{self.kind.replace(',', '').replace(' ', '-')}-{self.size}-{self.seed}"


def measure(run: Run, given: argparse.Namespace) -> Row:
    """Train and score draft after draft.

    Args:
        run: in its own home.
        given: domain of the recipe whose requests are learnt, "" for the one that the demonstration changes to, or
            data, a domain and its prompts in its place; sizes, numbers of requests, and of conversations of first
            drafts, 0 for none; seeds of every size up to 1,000; held-out prompts; lengths, the most tokens of an
            answer, empty for the recipe's alone.

    Raises:
        ValueError: nothing was built, there is no such domain or file, or it has too few prompts.
    """
    sizes, first_sizes, lengths = (sorted({*of} - {0}) for of in (given.sizes, given.first_sizes, given.lengths))
    num_seeds, num_prompts = given.seeds, given.prompts
    run.served()
    pair = first_pair(run.settings)
    domain, table = _domain(run, given.domain, given.data, max(sizes, default=1), num_prompts)
    first_domain = run.recipe.first_domains[0]
    # New drafts have learnt nothing yet, so that the domain can be split anew, most of it to be learnt.
    shares = {"num_train": max(first_sizes, default=0), "num_held_out": 2 * num_prompts, "num_requests": 0}
    first = run.recipe.traffic[first_domain].model_copy(update=shares)
    kinds = {REFRESH: (domain, table, sizes), FIRST: (first_domain, first, first_sizes)}
    rows: dict[Point, Row] = {}
    domains: dict[str, str] = {}
    for kind, (of_domain, traffic, of_kind) in kinds.items():
        if not of_kind:
            continue
        longest = max(lengths, default=run.recipe.generate.max_tokens)
        learnt, held_out = _samples(run, pair, kind, of_domain, traffic, max(of_kind), num_prompts, longest)
        for length in lengths or (longest,):
            named = f"{kind}, answers of {length}" if lengths else kind
            domains[named] = of_domain
            for point in points(named, of_kind, num_seeds):
                seed = run.recipe.seed + point.seed
                drawn = draw(learnt, point.size, seed, length, min(lengths, default=length))
                rows[point] = run.cells.keep(point.name, lambda: _learn(run, pair, point, drawn, held_out))  # noqa: B023
    return figures(rows, domains)


def points(kind: str, sizes: Sequence[int], num_seeds: int) -> Iterator[Point]:
    """Yield what is measured of one curve, small sizes first."""
    for size in sizes:
        for seed in range(num_seeds if size <= SEEDED else 1):
            yield Point(kind, size, seed)


def draw(samples: Sequence[Sample], size: int, seed: int, length: int, shortest: int) -> list[Sample]:
    """Draw the samples of a seed, each cut after `length` tokens of its answer; a larger size holds the smaller one's.

    A greedy answer's beginning is what would be answered with that limit. Of longer answers only as many are taken as
    have, together, the tokens that `size` answers of the shortest length have.

    Args:
        samples: all there are, with answers of the greatest length.
        size: samples of the shortest length.
        seed: of the order.
        length, shortest: the most tokens of an answer.
    """
    order = np.random.default_rng(seed).permutation(len(samples))
    wanted = sum(len(samples[number].completion_ids[:shortest]) for number in order[:size])
    drawn: list[Sample] = []
    for number in order[:size]:
        if wanted <= 0:
            break
        drawn.append(samples[number]._replace(completion_ids=samples[number].completion_ids[:length]))
        wanted -= len(drawn[-1].completion_ids)
    return drawn


def _domain(run: Run, domain: str, data: str | None, most: int, num_prompts: int) -> tuple[str, Traffic]:
    """Return what the refreshes learn: a name and where its prompts come from."""
    if data is not None and domain:
        raise ValueError(f'--data {data} is learnt in place of a domain of the recipe; got --domain "{domain}" too')
    if data is not None:
        return file_traffic(data, most, 2 * num_prompts)
    name = domain or (run.recipe.demo.new_domain if run.recipe.demo else run.recipe.first_domains[0])
    if name not in run.recipe.traffic:
        raise ValueError(f'no domain "{name}"; recipe {run.recipe.name} has: {", ".join(run.recipe.traffic)}')
    return name, run.recipe.traffic[name]


def _samples(
    run: Run, pair: Pair, kind: str, domain: str, traffic: Traffic, most: int, num_prompts: int, max_tokens: int
) -> tuple[list[Sample], list[Sample]]:
    """Return what is learnt from and what is held out, answered by the target."""
    sizes = {"requests" if kind == REFRESH else "train": most, "held_out": num_prompts}
    parts = {part: choose_more(domain, traffic, run.recipe.seed, part, size) for part, size in sizes.items()}
    wanted = [prompt for of_part in parts.values() for prompt in of_part]
    cell = f"answers-{kind.replace(' ', '-')}"
    answered = {one.id: one for one in answers(run, pair.target_files, wanted, cell, max_tokens)}
    learnt, held_out = ([answered[prompt.id] for prompt in of_part] for of_part in parts.values())
    return learnt, held_out


def _learn(run: Run, pair: Pair, point: Point, drawn: Sequence[Sample], held_out: Sequence[Sample]) -> Row:
    """Train one draft, and hold it to the answers that no draft learns from."""
    recipe, seed, target_dir = run.recipe, run.recipe.seed + point.seed, open_artifact(pair.target_files)
    start, params, samples = None, recipe.distill, list(drawn)
    if point.kind.startswith(REFRESH):
        start, params = open_artifact(pair.draft_files), recipe.refresh_distill()
        older = read_samples(first_samples(pair.draft), "train")
        samples += draw_per_domain(older, recipe.refresh.replay_per_domain, seed)
    with run.bar(f"{point.kind} of {point.size}", 1) as bar:
        directory, report = teach(run, pair, start, params, samples, max(DRAFTED), seed, point.name)
        bar.advance()
    work, device = run.folder / "states", run.settings.device
    told = {}
    for num_tokens in DRAFTED:
        scored = open_draft(directory, target_dir)  # with the weights as rounded as they are served
        traces = trace(scored, target_dir, held_out, num_tokens, work, device, recipe.engine.rules.greedy)
        told[str(num_tokens)] = summarise(traces, seed).model_dump(mode="json")
    return {
        "acceptance": told,
        "num_tokens": sum(len(sample.completion_ids) for sample in drawn),
        "train_s": round(report.seconds, 1),
        "num_steps": report.num_steps,
        "tokens_per_s": round(report.tokens_per_s),
        "hidden_tokens_per_s": round(report.hidden_tokens_per_s),
    }


def figures(rows: Mapping[Point, Row], domains: Mapping[str, str]) -> Row:
    """Put seeds together.

    Args:
        rows: of each draft.
        domains: kind of draft to the domain that it learns.
    """
    found: dict[str, list[Row]] = {}
    for kind in dict.fromkeys(point.kind for point in rows):
        for size in sorted({point.size for point in rows if point.kind == kind}):
            seeds = [row for point, row in rows.items() if (point.kind, point.size) == (kind, size)]
            found.setdefault(kind, []).append({"size": size, **_of_seeds(seeds)})
    return {"domains": dict(domains), "curves": found}


def _of_seeds(rows: Sequence[Row]) -> Row:
    """Return the means over seeds, and for each K the lowest and the highest τ."""
    acceptance = {}
    for k in map(str, DRAFTED):
        taus = [row["acceptance"][k]["tau"] for row in rows]
        per_position = [[one["value"] for one in row["acceptance"][k]["per_position"]] for row in rows]
        acceptance[k] = {
            "tau": {end: float(np.mean([tau[end] for tau in taus])) for end in ("value", "low", "high")},
            "seeds": [min(tau["value"] for tau in taus), max(tau["value"] for tau in taus)],
            "per_position": np.mean(per_position, axis=0).tolist(),
        }
    measured = ("num_tokens", "train_s", "num_steps", "tokens_per_s")
    means = {name: round(float(np.mean([row[name] for row in rows])), 1) for name in measured}
    return {"num_seeds": len(rows), "acceptance": acceptance, **means}


def _cells(kind: str, row: Row) -> list[str]:
    return [
        kind,
        f"{row['size']}",
        f"{row['num_tokens']:.0f}",
        f"{row['num_seeds']}",
        *(_tau(row["acceptance"][str(k)]) for k in DRAFTED),
        ", ".join(f"{share:.2f}" for share in row["acceptance"][str(max(DRAFTED))]["per_position"]),
        f"{row['num_steps']:.0f}",
        f"{row['train_s']:.0f}",
    ]


def _tau(acceptance: Row) -> str:
    tau, (lowest, highest) = acceptance["tau"], acceptance["seeds"]
    return f"{tau['value']:.3f} ({tau['low']:.3f} to {tau['high']:.3f}; {lowest:.3f} to {highest:.3f})"


def main() -> None:
    """Measure and print."""
    parser = arguments("Measure what drafts learn of more and more traffic.")
    parser.add_argument("--domain", default="", help="whose requests are learnt; by default the demo's second one")
    parser.add_argument("--data", metavar="DOMAIN=FILE", help="a domain in its place, read by source dataset")
    parser.add_argument("--size", dest="sizes", type=int, nargs="+", default=SIZES, help="requests of a refresh")
    parser.add_argument("--first", dest="first_sizes", type=int, nargs="+", default=FIRST_SIZES, help="conversations")
    parser.add_argument("--seeds", type=int, default=3, help="for each number of requests up to 1,000")
    parser.add_argument("--prompts", type=int, default=100, help="held out, of each domain")
    parser.add_argument("--max-tokens", dest="lengths", type=int, nargs="+", default=[], help="lengths of answers")
    given = parser.parse_args()
    run = open_run("learning", given)
    found = measure(run, given)
    taus = [f"τ, K = {k}" for k in DRAFTED]
    columns = [
        "",
        "learnt",
        "answer tokens",
        "seeds",
        *taus,
        f"accepted at 1 to {max(DRAFTED)}",
        "steps",
        "training, s",
    ]
    rows = [_cells(kind, row) for kind, of_kind in found["curves"].items() for row in of_kind]
    show({**run.setup, **found}, "τ: mean over seeds, of their 95% intervals, and its range over seeds", columns, rows)


if __name__ == "__main__":
    main()
