"""What answering logged prompts again adds to a refresh that has few requests, all of them cut short.

    python -m tests.benchmarks.regeneration [--requests 92] [--served 40] [--anew 1 2 4]

The line's first draft goes on with requests of one domain and the recipe's replay, and is held to answers that no draft
learns from, to the length that is served and to a greater one. It learns the requests as they were served, cut off
after so many tokens; with three times the passes; continued to the recipe's length; and answered anew besides, once or
more often, as `tasks/regenerate.py` does. All arms have the recipe's passes but the second, so that more answers take
more steps. Nothing is served: acceptance is counted on the target's own answers (`models.core.evaluation.scoring`).
"""

import argparse
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from infra.artifacts import open_artifact
from infra.versions import Pair
from models.core.checkpoints.loading import load_model
from models.core.drafting.draft_families import open_draft
from models.core.evaluation.paired import Score, clusters, gain
from models.core.evaluation.scoring import score
from models.core.layers.kernels import fast_dtype
from models.core.learning import distill
from models.core.learning.answering import Ask, go_on
from models.core.learning.hidden import Sample
from models.recipe import Regeneration
from models.targets import stop_ids
from tasks.measure.drift import answers, file_traffic
from tasks.measure.run import Run, first_pair
from tasks.regenerate import BATCH
from tasks.register import first_samples
from tasks.select_data import choose_more
from tasks.stages.samples import draw_per_domain, read_samples
from tests.benchmarks.pupil import teach
from tests.benchmarks.scripts import arguments, open_run, show

LONG = 100  # tokens of an answer that drafts are held to, beside what is served
MORE_PASSES = 3
SERVED, PASSES, CONTINUED = "as served", f"as served, {MORE_PASSES} times the passes", "continued"

Scores = dict[int, list[Score]]  # by the length of the answers that a draft is held to


class Arm(NamedTuple):
    """What one draft learns."""

    name: str
    passes: int = 1  # times the recipe's
    continues: bool = False
    num_anew: int = 0


def arms(anew: Sequence[int]) -> list[Arm]:
    """Return what is compared; the first is what the others are held to."""
    more = [Arm(f"{CONTINUED}, and anew × {num}", continues=True, num_anew=num) for num in sorted(anew)]
    return [Arm(SERVED), Arm(PASSES, passes=MORE_PASSES), Arm(CONTINUED, continues=True), *more]


def measure(run: Run, given: argparse.Namespace) -> dict[str, Any]:
    """Train and score draft after draft; ValueError if nothing was built, or there are too few prompts.

    Args:
        run: in its own home.
        given: data, a domain and its prompts, None for the domain that the demonstration changes to; requests that are
            learnt; served, tokens of their answers; anew, how often each is answered besides; held-out prompts; seeds.
    """
    run.served()
    pair, recipe = first_pair(run.settings), run.recipe
    again = recipe.refresh.regenerate or Regeneration()
    domain = recipe.demo.new_domain if recipe.demo else recipe.first_domains[0]
    traffic = recipe.traffic[domain]
    if given.data is not None:
        domain, traffic = file_traffic(given.data, given.requests, 2 * given.prompts)
    chosen = {
        "requests": choose_more(domain, traffic, recipe.seed, "requests", given.requests),
        "held_out": choose_more(domain, traffic, recipe.seed, "held_out", given.prompts),
    }
    longest = max(again.max_tokens, LONG)
    prompts = [prompt for part in chosen.values() for prompt in part]
    said = {one.id: one for one in answers(run, pair.target_files, prompts, "answers", longest)}
    requests, held_out = ([said[prompt.id] for prompt in part] for part in chosen.values())
    others = [_anew(run, pair, requests, again, number) for number in range(max(given.anew, default=0))]
    found: dict[str, list[Scores]] = {}
    for arm in arms(given.anew):
        learnt = cut(requests, again.max_tokens if arm.continues else given.served)
        learnt += [one for answered in others[: arm.num_anew] for one in answered]
        for seed in range(recipe.seed, recipe.seed + given.seeds):
            name = f"draft-{arm.name.replace(',', '').replace(' ', '-')}-{seed}"
            told = run.cells.keep(name, lambda: _learn(run, pair, arm, learnt, held_out, given.served, seed, name))  # noqa: B023
            scores = {int(length): [Score(**one) for one in of_length] for length, of_length in told.items()}
            found.setdefault(arm.name, []).append(scores)
    return {"domain": domain, "arms": {name: against(found[SERVED], of_arm) for name, of_arm in found.items()}}


def cut(samples: Sequence[Sample], num_tokens: int) -> list[Sample]:
    """Return answers as a limit would have cut them; a greedy answer's beginning is what it would have been."""
    return [one._replace(completion_ids=one.completion_ids[:num_tokens]) for one in samples]


def against(base: Sequence[Scores], found: Sequence[Scores]) -> dict[str, Any]:
    """Return an arm's τ by length, and what it gains on another one; seeds of one prompt count as one observation."""
    told = {}
    for length in base[0]:
        first, second = (
            [
                one.model_copy(update={"id": f"{one.id}, seed {seed}", "cluster": one.id})
                for seed, scores in enumerate(of_arm)
                for one in scores[length]
            ]
            for of_arm in (base, found)
        )
        tau = 1 + sum(one.accepted for one in second) / sum(one.steps for one in second)
        told[str(length)] = {"tau": tau, "gain": gain(clusters(first, second)).model_dump()}
    return told


def _anew(run: Run, pair: Pair, samples: Sequence[Sample], again: Regeneration, number: int) -> list[Sample]:
    """Return each prompt's answer, drawn at the recipe's temperature."""
    temperature = again.temperature or 1.0

    def ask() -> list[dict[str, Any]]:
        directory, device = open_artifact(pair.target_files), run.settings.device
        model, stops = load_model(directory, fast_dtype(device), device), stop_ids(directory)
        ordered = sorted(samples, key=lambda one: len(one.prompt_ids))
        rows = []
        with run.bar(f"answer anew, {number + 1}", len(ordered)) as bar:
            for start in range(0, len(ordered), BATCH):
                batch, rng = ordered[start : start + BATCH], torch.Generator(device).manual_seed(start * 1000 + number)
                asks = [Ask(one.prompt_ids, again.max_tokens, temperature) for one in batch]
                for one, said in zip(batch, go_on(model, asks, stops, rng), strict=True):
                    anew = one._replace(id=f"{one.id}, anew {number}", completion_ids=said, temperature=temperature)
                    rows.append(anew._asdict())
                    bar.advance()
        return rows

    return [Sample(**row) for row in run.cells.keep(f"anew-{number}", ask)]


def _learn(
    run: Run,
    pair: Pair,
    arm: Arm,
    learnt: Sequence[Sample],
    held_out: Sequence[Sample],
    served: int,
    seed: int,
    name: str,
) -> dict[str, Any]:
    recipe, target_dir = run.recipe, open_artifact(pair.target_files)
    params = recipe.refresh_distill()
    assert isinstance(params, distill.Params)  # which a recipe's fields can't say without importing torch
    params = params.model_copy(update={"num_epochs": arm.passes * params.num_epochs})
    older = read_samples(first_samples(pair.draft), "train")
    samples = [*learnt, *draw_per_domain(older, recipe.refresh.replay_per_domain, seed)]
    num = recipe.num_draft_tokens
    directory, _ = teach(run, pair, open_artifact(pair.draft_files), params, samples, num, seed, name)
    told = {}
    for length in (served, LONG):
        scored = open_draft(directory, target_dir)  # with the weights as rounded as they are served
        scores = score(scored, target_dir, cut(held_out, length), num, run.folder / "states", run.settings.device)
        told[str(length)] = [one.model_dump() for one in scores]
    return told


def cells(name: str, found: Mapping[str, Any]) -> list[str]:
    """Return a table's row of an arm."""
    row = [name]
    for told in found.values():
        change = told["gain"]
        row.append(f"{told['tau']:.3f}")
        row.append("" if name == SERVED else f"{change['value']:+.3f} ({change['low']:+.3f} to {change['high']:+.3f})")
    return row


def main() -> None:
    """Measure and print."""
    parser = arguments("Measure what a refresh gains by answering its prompts again.")
    parser.add_argument("--data", metavar="DOMAIN=FILE", help="a domain in the demo's second one's place")
    parser.add_argument("--requests", type=int, default=92, help="that are learnt")
    parser.add_argument("--served", type=int, default=40, help="tokens after which their answers were cut off")
    parser.add_argument("--anew", type=int, nargs="*", default=[1], help="how often each is answered besides, by arm")
    parser.add_argument("--prompts", type=int, default=60, help="held out")
    parser.add_argument("--seeds", type=int, default=1, help="of the training")
    given = parser.parse_args()
    run = open_run("regeneration", given)
    found = measure(run, given)
    lengths = (given.served, LONG)
    columns = ["learnt", *(text for length in lengths for text in (f"τ, {length} tokens", "change"))]
    rows = [cells(name, of_arm) for name, of_arm in found["arms"].items()]
    show({**run.setup, **found}, f"a refresh of {given.requests} requests of {found['domain']}", columns, rows)


if __name__ == "__main__":
    main()
