"""How often the interval of a window's gain holds what fresh requests of the same traffic give.

Requests are answered that were never logged. Again and again a half of them is drawn to be a log, with a secret of its
own: that clusters it, reserves probes and holds out as a refresh on all of it would, and the gate tells its interval of
what was held out. The truth is the gain on the other half. Nothing is trained meanwhile: the gain is that of a draft
which the line's first one became on requests of other groups, so that both halves are new to it. A log is drawn anew
each time because what one log happens to hold is the same for all splits of it.

The served draft's own window is told beside that. Its held-out groups are new to it, while traffic goes on asking for
those that it learnt from, which it serves better. So its interval may lie below the truth; it must not lie above.
"""

import hashlib
import math
import sys
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

import numpy as np

from infra.artifacts import open_artifact, publish
from infra.probes import plan
from infra.querylog import QueryLog
from infra.registry import open_registry
from infra.versions import Pair
from infra.views.results import Grid, Report, interval
from infra.windows import Window
from models.acceptance import Estimate
from models.drafts import open_draft
from models.gate import Evidence
from models.hidden import Sample
from models.paired import Score
from models.scoring import score
from models.sources import Prompt
from tasks.measure.answers import answers
from tasks.measure.home import files_of, first_pair
from tasks.measure.pupil import teach
from tasks.measure.run import Run
from tasks.select_data import choose_more
from tasks.stages.samples import Part, read_samples
from tasks.stages.split import cluster_samples, counted, drawn_by, held_out_by, stands_for

TITLE, QUESTION = "coverage", "does the interval of a window's gain hold what fresh requests give?"
AIM = 0.93
FIRST, SERVED, PUPIL = "first", "served", "pupil"  # drafts

Scores = dict[str, Score]


class Mean(NamedTuple):
    """A mean and its standard error."""

    value: float
    error: float

    def text(self) -> str:
        """Return it with half of its 95% interval."""
        return f"{self.value:+.3f} ± {1.96 * self.error:.3f}"


class Split(NamedTuple):
    """One log: the ids that it holds, and id to cluster and weight of those that judge."""

    log: list[str]
    judged: dict[str, tuple[str, float]]


class Traffic(NamedTuple):
    """What drafts are scored on; a sample's cluster is the group that its prompt belongs to.

    Attributes:
        fresh: requests of the groups that traffic asks for, none of which was logged.
        other: requests of other groups.
        told: what the served draft's window held out and reserved, with clusters and weights.
    """

    fresh: list[Sample]
    other: list[Sample]
    told: list[Sample]

    @property
    def all(self) -> list[Sample]:
        """Everything, in one row."""
        return [*self.fresh, *self.other, *self.told]


def measure(run: Run, num_splits: int, num_prompts: int) -> Report:
    """Score the drafts once, and draw logs again and again.

    Args:
        run: the benchmark.
        num_splits: logs.
        num_prompts: requests of each domain that were never logged.

    Raises:
        ValueError: nothing was built or logged, or a domain has too few requests.
    """
    served, log, pair = run.served().champion, run.logged(), first_pair(run.settings)
    traffic = _traffic(run, log, pair, served, num_prompts)
    log.close()
    drafts = {
        FIRST: open_artifact(pair.draft_files),
        SERVED: open_artifact(files_of(run.settings, "draft", served)),
        PUPIL: _pupil(run, pair, traffic.other),
    }
    scored = {name: _scores(run, pair, directory, traffic.all, name) for name, directory in drafts.items()}
    target_dir, fraction = open_artifact(pair.target_files), run.recipe.refresh.held_out_fraction

    def draw() -> list[Split]:
        with run.bar("logs", num_splits) as bar:
            made = []
            for number in range(num_splits):
                made.append(split(traffic.fresh, number, run.recipe.seed, fraction, target_dir))
                bar.advance()
        return made

    splits = [Split(*row) for row in run.cells.keep("splits", draw)]
    return make_report(traffic, scored, splits, run.recipe.num_draft_tokens)


def _traffic(run: Run, log: QueryLog, pair: Pair, served: int, num_prompts: int) -> Traffic:
    """Return what is scored; what was never logged is answered by the target."""
    domains = sorted({row.domain for row in log.rows(1, sys.maxsize)} & run.recipe.traffic.keys())
    if not domains:
        raise ValueError("the log has no request in a domain of the recipe")
    prompts: dict[str, list[Prompt]] = {"fresh": [], "other": []}
    for domain in domains:
        table, seed = run.recipe.traffic[domain], run.recipe.seed
        more = choose_more(domain, table, seed, "requests", table.num_requests + num_prompts)
        prompts["fresh"] += more[table.num_requests :]  # the recipe's own may be in the log
        prompts["other"] += choose_more(domain, table, seed, "held_out", table.num_held_out)
    wanted = [prompt for of_part in prompts.values() for prompt in of_part]
    groups = {prompt.id: prompt.group for prompt in wanted}
    answered = answers(run, pair.target_files, wanted, "answers")
    samples = {one.id: one._replace(cluster=groups[one.id]) for one in answered}
    fresh, other = ([samples[prompt.id] for prompt in of_part] for of_part in prompts.values())
    return Traffic(fresh, other, _told(run, served, domains))


def _told(run: Run, served: int, domains: Sequence[str]) -> list[Sample]:
    """Return what a draft's window held out and reserved; nothing for one that no window made."""
    window = open_registry(run.settings).get("draft", served).lineage.window
    if window is None:
        return []
    samples = publish(Path(unquote(urlsplit(window.uri).path)), "samples")
    parts: tuple[Part, ...] = ("held_out", "probe")
    return [one for part in parts for one in read_samples(samples, part) if one.domain in domains]


def _pupil(run: Run, pair: Pair, samples: Sequence[Sample]) -> Path:
    """Return the directory of the first draft after it went on with samples, as in a refresh."""

    def taught() -> str:
        start, params = open_artifact(pair.draft_files), run.recipe.refresh_distill()
        with run.bar(f"learning from {len(samples)} requests of other groups", 1) as bar:
            directory, _ = teach(run, pair, start, params, samples, run.recipe.num_draft_tokens, run.recipe.seed, PUPIL)
            bar.advance()
        return directory.name

    return run.folder / "drafts" / str(run.cells.keep(PUPIL, taught))


def _scores(run: Run, pair: Pair, directory: Path, samples: Sequence[Sample], name: str) -> Scores:
    """Return id to how a draft would have served each sample."""

    def scored() -> list[dict[str, Any]]:
        target_dir = open_artifact(pair.target_files)
        opened = open_draft(directory, target_dir)
        work, rules = run.folder / "states", run.recipe.engine.rules
        with run.bar(f"scores of {name}", 1) as bar:
            found = score(opened, target_dir, samples, run.recipe.num_draft_tokens, work, run.settings.device, rules)
            bar.advance()
        return [one.model_dump() for one in found]

    return {row["id"]: Score.model_validate(row) for row in run.cells.keep(f"scores-{name}", scored)}


def split(fresh: Sequence[Sample], number: int, seed: int, held_out_fraction: float, target_dir: Path) -> Split:
    """Draw one log, and what a refresh on all of it would have judged by.

    Args:
        fresh: what half is drawn of; clusters are groups.
        number: of the log.
        seed: of the benchmark.
        held_out_fraction: share of the clusters that the gate gets.
        target_dir: whose tokenizer wrote the prompts.
    """
    order = np.random.default_rng([seed, number]).permutation(len(fresh))
    samples = [fresh[place] for place in order[: len(fresh) // 2]]
    secret = hashlib.sha256(f"{seed} log {number}".encode()).digest()
    rows = cluster_samples(samples, secret, target_dir)
    window = Window(first_seq=1, last_seq=len(rows), num_rows=len(rows), sha256="", owner=TITLE)
    draw, seqs, of_domain = drawn_by(secret), range(1, len(rows) + 1), Counter(row.domain for row in rows)
    of_cluster = Counter((row.domain, row.cluster) for row in rows)
    reserved = plan(rows, (), window.first_seq, seqs, (), draw).reserved
    kept = {rows[seq - 1].cluster for seq in reserved}
    is_held_out = held_out_by(secret, rows, window, held_out_fraction, ())
    tests = [row for row in rows if is_held_out(row.cluster) and row.cluster not in kept]
    probes = [rows[seq - 1] for seq in reserved]
    judged = {row.seq: stands_for(of_cluster[row.domain, row.cluster], of_domain[row.domain]) for row in probes}
    judged |= counted(tests, of_domain, draw)
    return Split(
        [one.id for one in samples],
        {samples[seq - 1].id: (rows[seq - 1].cluster, weight) for seq, weight in judged.items()},
    )


def make_report(
    traffic: Traffic, scored: Mapping[str, Scores], splits: Sequence[Split], num_draft_tokens: int
) -> Report:
    """Hold the intervals of all logs to what the requests outside of them give.

    Args:
        traffic: what was scored.
        scored: draft, which is `FIRST`, `SERVED` or `PUPIL`, to id to its score.
        splits: the logs.
        num_draft_tokens: K.

    Raises:
        ValueError: a log has nothing to be judged by.
    """
    if empty := sum(not one.judged for one in splits):
        raise ValueError(f"{empty} of {len(splits)} logs have no conversation to be judged by")
    first, fresh = scored[FIRST], traffic.fresh
    shares = {domain: count / len(fresh) for domain, count in Counter(one.domain for one in fresh).items()}
    held = []
    for one in splits:
        inside = set(one.log)
        rest = [sample for sample in fresh if sample.id not in inside]
        found = estimate(one.judged, first, scored[PUPIL], shares, num_draft_tokens)
        held.append((found, mean_gain(rest, first, scored[PUPIL], shares).value))
    rate = summary(held)
    conversations = float(np.median([len(one.judged) for one in splits]))
    clusters = float(np.median([len({cluster for cluster, _ in one.judged.values()}) for one in splits]))
    gains = {name: mean_gain(fresh, first, scored[name], shares) for name in (PUPIL, SERVED)}
    other = mean_gain(traffic.other, first, scored[SERVED], shares)
    own = {one.id: (one.cluster or one.id, one.weight) for one in traffic.told if one.domain in shares}
    told = estimate(own, first, scored[SERVED], shares, num_draft_tokens) if own else None
    promises = told is not None and told.low > gains[SERVED].value
    notes = [
        f"{len(fresh)} fresh requests gain {gains[PUPIL].text()} with the draft that learnt from other groups.",
        f"The served one gains {gains[SERVED].text()} on them, {other.text()} on {len(traffic.other)} of other groups.",
    ]
    if told is not None:
        notes.append(f"Its own window told {interval(told.model_dump())} by {len(own)} conversations.")
    share = rate["covered"] / len(splits)
    return Report(
        figures={
            "logs": rate | {"conversations": conversations, "clusters": clusters},
            "fresh": {name: one._asdict() for name, one in gains.items()},
            "other_groups": other._asdict(),
            "told": None if told is None else told.model_dump(),
            "num_fresh": len(fresh),
            "num_other": len(traffic.other),
        },
        grids=[
            Grid(
                f"{len(splits)} logs of {len(fresh) // 2} requests, gain over the first draft, accepted tokens a step",
                ["hold the truth", "too high", "too low", "mean", "truth", "spread", "half width", "judged by"],
                [
                    [
                        *(f"{rate[name]:.0f}" for name in ("covered", "too_high", "too_low")),
                        *(f"{rate[name]:+.3f}" for name in ("mean", "truth")),
                        *(f"{rate[name]:.3f}" for name in ("spread", "half_width")),
                        f"{conversations:.0f} conversations of {clusters:.0f} clusters",
                    ]
                ],
            )
        ],
        notes=notes,
        verdict=(
            f"{'meets' if share >= AIM and not promises else 'misses'} the bar ({AIM:.0%}): {share:.0%} of the "
            f"intervals hold the truth; the served draft's {'promises' if promises else 'does not promise'} too much."
        ),
    )


def estimate(
    judged: Mapping[str, tuple[str, float]],
    first: Scores,
    later: Scores,
    shares: Mapping[str, float],
    num_draft_tokens: int,
) -> Estimate:
    """Return the gain with its 95% interval, as the gate tells it of one window.

    Args:
        judged: id to cluster and weight of what is judged by.
        first: id to the first draft's score.
        later: id to that of the draft that is held against it.
        shares: domain to its share of the traffic.
        num_draft_tokens: K.
    """
    kept = {id: {"cluster": cluster, "weight": weight} for id, (cluster, weight) in judged.items() if id in first}
    before, after = ([of[id].model_copy(update=said) for id, said in kept.items()] for of in (first, later))
    last = Evidence.start(num_draft_tokens).after(before, after, shares).last
    assert last is not None
    return last


def mean_gain(samples: Sequence[Sample], first: Scores, later: Scores, shares: Mapping[str, float]) -> Mean:
    """Return the mean gain of samples, with its standard error over their groups.

    Args:
        samples: those without a score are left out; a cluster is a group, "" is one of its own.
        first: id to the first draft's score.
        later: id to that of the draft that is held against it.
        shares: domain to its share; one without a sample counts as one without gain.
    """
    value, variance = 0.0, 0.0
    for domain, share in shares.items():
        kept = [one for one in samples if one.domain == domain and one.id in first]
        if not kept:
            continue
        gains = [
            later[one.id].accepted / later[one.id].steps - first[one.id].accepted / first[one.id].steps for one in kept
        ]
        mean, sums = float(np.mean(gains)), defaultdict[str, float](float)
        for sample, one in zip(kept, gains, strict=True):
            sums[sample.cluster or sample.id] += one - mean
        value += share * mean
        variance += share**2 * sum(one**2 for one in sums.values()) / len(kept) ** 2
    return Mean(value, math.sqrt(variance))


def summary(held: Sequence[tuple[Estimate, float]]) -> dict[str, float]:
    """Return how many of the intervals hold their truth, and how they lie."""
    values = np.array([one.value for one, _ in held])
    return {
        "covered": sum(one.low <= truth <= one.high for one, truth in held),
        "too_high": sum(one.low > truth for one, truth in held),
        "too_low": sum(one.high < truth for one, truth in held),
        "mean": float(values.mean()),
        "truth": float(np.mean([truth for _, truth in held])),
        "spread": float(values.std(ddof=1)) if len(held) > 1 else 0.0,
        "half_width": float(np.median([(one.high - one.low) / 2 for one, _ in held])),
    }
