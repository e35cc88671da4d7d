"""How often the interval of a window's gain holds what fresh requests of the same traffic give, on splits of a log.

The drafts are fixed, the line's first one and the served one, and both are scored once. Each split has a secret of its
own, which clusters the log, reserves probes and holds out as a refresh on all of it would, and the gate tells its
interval of what was held out. Nothing is trained for a split, so that it is judged by those conversations that the
served draft did not learn from; what all of them would have told stands beside that. The figure to be held is what the
served draft gains on requests that were never logged, from the groups that the logged ones came from.
"""

import hashlib
import math
import sys
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

import numpy as np

from infra.artifacts import Artifact, open_artifact, publish
from infra.probes import plan
from infra.querylog import QueryLog
from infra.registry import open_registry
from infra.versions import Pair
from infra.views.results import Grid, Report
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
from tasks.measure.run import Run
from tasks.register import first_samples
from tasks.select_data import choose_more
from tasks.stages.samples import Part, read_samples, usable
from tasks.stages.split import cluster_log, counted, drawn_by, held_out_by

TITLE, QUESTION = "coverage", "does the interval of a window's gain hold what fresh requests give?"
AIM = 0.93
UNSEEN, ALL = "rows that the served draft did not learn from", "all rows"

Scores = dict[str, Score]


class Mean(NamedTuple):
    """A mean and its standard error."""

    value: float
    error: float

    def text(self) -> str:
        """Return it with half of its 95% interval."""
        return f"{self.value:+.3f} ± {1.96 * self.error:.3f}"


class Traffic(NamedTuple):
    """What drafts are scored on: rows of the log, requests that were never logged, and those of other groups."""

    logged: list[Sample]
    fresh: list[Sample]
    other: list[Sample]
    groups: dict[str, str]

    @property
    def all(self) -> list[Sample]:
        """Everything, in one row."""
        return [*self.logged, *self.fresh, *self.other]


def measure(run: Run, num_splits: int, num_prompts: int) -> Report:
    """Score the drafts once, and split the log again and again.

    Args:
        run: the benchmark.
        num_splits: secrets.
        num_prompts: requests of each domain that were never logged.

    Raises:
        ValueError: nothing was built or logged, or a domain has too few requests.
    """
    served, log, pair = run.served().champion, run.logged(), first_pair(run.settings)
    traffic = _traffic(run, log, pair.target_files, num_prompts)
    drafts = {"first": pair.draft_files, "served": files_of(run.settings, "draft", served)}
    scored = {name: _scores(run, pair, files, traffic.all, name) for name, files in drafts.items()}
    unseen = run.cells.keep("unseen", lambda: _unseen(run, served, log))
    splits = run.cells.keep("splits", lambda: _splits(run, pair, traffic.logged, num_splits))
    log.close()
    return make_report(traffic, scored["first"], scored["served"], unseen, splits, run.recipe.num_draft_tokens)


def _traffic(run: Run, log: QueryLog, target_files: Artifact, num_prompts: int) -> Traffic:
    """Return what is scored; what was never logged is answered by the target."""
    rows = [row for row in log.rows(1, sys.maxsize) if row.domain in run.recipe.traffic]
    logged, _ = usable(rows, 1, 1.0, len(rows))
    if not logged:
        raise ValueError("the log has no answer of the served target in a domain of the recipe")
    prompts: dict[str, list[Prompt]] = {"fresh": [], "other": []}
    for domain in sorted({one.domain for one in logged}):
        table, seed = run.recipe.traffic[domain], run.recipe.seed
        more = choose_more(domain, table, seed, "requests", table.num_requests + num_prompts)
        prompts["fresh"] += more[table.num_requests :]  # the recipe's own may be in the log
        prompts["other"] += choose_more(domain, table, seed, "held_out", table.num_held_out)
    wanted = [prompt for of_part in prompts.values() for prompt in of_part]
    samples = {one.id: one for one in answers(run, target_files, wanted, "answers")}
    fresh, other = ([samples[prompt.id] for prompt in prompts[part]] for part in prompts)
    return Traffic(logged, fresh, other, {prompt.id: prompt.group for prompt in wanted})


def _unseen(run: Run, served: int, rows: QueryLog) -> list[str]:
    """Return the ids of the rows that the served draft did not learn from.

    They are those that its last window held out or gave to the probe sets, and those that came later: what was held out
    of an earlier window was learnt since.
    """
    window = open_registry(run.settings).get("draft", served).lineage.window
    if window is None:
        return [row.id for row in rows.rows(1, sys.maxsize)]
    samples = publish(Path(unquote(urlsplit(window.uri).path)), "samples")
    parts: tuple[Part, ...] = ("held_out", "probe")
    later = rows.rows(window.last_seq + 1, sys.maxsize)
    return [one.id for part in parts for one in read_samples(samples, part)] + [row.id for row in later]


def _scores(run: Run, pair: Pair, draft: Artifact, samples: Sequence[Sample], name: str) -> Scores:
    """Return id to how a draft would have served each sample."""

    def scored() -> list[dict[str, Any]]:
        target_dir = open_artifact(pair.target_files)
        opened = open_draft(open_artifact(draft), target_dir)
        work, rules = run.folder / "states", run.recipe.engine.rules
        with run.bar(f"scores of {name}", 1) as bar:
            found = score(opened, target_dir, samples, run.recipe.num_draft_tokens, work, run.settings.device, rules)
            bar.advance()
        return [one.model_dump() for one in found]

    return {row["id"]: Score.model_validate(row) for row in run.cells.keep(f"scores-{name}", scored)}


def _seqs(run: Run) -> dict[str, int]:
    """Return id to seq of the log's rows."""
    log = QueryLog(run.settings.querylog)
    found = {row.id: row.seq for row in log.rows(1, sys.maxsize) if row.seq is not None}
    log.close()
    return found


def _splits(run: Run, pair: Pair, logged: Sequence[Sample], num_splits: int) -> list[dict[str, str]]:
    """Return, for each secret, id to cluster of what a refresh on the whole log would have judged by."""
    samples = first_samples(pair.draft)
    learnt, both = read_samples(samples, "train"), [*read_samples(samples, "train"), *read_samples(samples, "held_out")]
    seqs, made, fraction = _seqs(run), [], run.recipe.refresh.held_out_fraction
    usable_seqs = {seqs[sample.id] for sample in logged}
    window = Window(
        first_seq=min(usable_seqs), last_seq=max(usable_seqs), num_rows=len(usable_seqs), sha256="", owner=TITLE
    )
    with run.bar("splits", num_splits) as bar:
        for number in range(num_splits):
            secret = hashlib.sha256(f"{run.recipe.seed} split {number}".encode()).digest()
            found = cluster_log(run.settings.querylog, secret, pair.target_files.path, both, sys.maxsize)
            rows = [row for row in found.rows if row.seq in usable_seqs]
            cluster_of, trained = {row.seq: row.cluster for row in rows}, {found.first[one.id] for one in learnt}
            reserved = set(plan(rows, (), window.first_seq, usable_seqs, trained, drawn_by(secret)).reserved)
            kept = {cluster_of[seq] for seq in reserved}
            is_held_out = held_out_by(secret, rows, window, fraction, trained)
            tests = [row for row in rows if is_held_out(row.cluster) and row.cluster not in kept]
            judged = reserved | counted(tests, drawn_by(secret))
            made.append({one.id: cluster_of[seqs[one.id]] for one in logged if seqs[one.id] in judged})
            bar.advance()
    return made


def make_report(
    traffic: Traffic,
    first: Scores,
    served: Scores,
    unseen: Sequence[str],
    splits: Sequence[Mapping[str, str]],
    num_draft_tokens: int,
) -> Report:
    """Hold the intervals of all splits to what fresh requests give.

    Args:
        traffic: what was scored.
        first: id to the first draft's score.
        served: id to the served draft's.
        unseen: ids of the rows that the served draft did not learn from.
        splits: id to cluster of what each is judged by.
        num_draft_tokens: K.

    Raises:
        ValueError: a split has nothing to be judged by.
    """
    kept = [sample for sample in traffic.logged if sample.id in first]
    shares = {domain: count / len(kept) for domain, count in Counter(sample.domain for sample in kept).items()}
    fresh, other = (
        mean_gain(samples, first, served, shares, traffic.groups) for samples in (traffic.fresh, traffic.other)
    )
    rows: dict[str, set[str]] = {UNSEEN: set(unseen), ALL: {sample.id for sample in kept}}
    sides = {
        name: _side(kept, ids, splits, first, served, shares, fresh.value, num_draft_tokens)
        for name, ids in rows.items()
    }
    learnt = mean_gain([one for one in kept if one.id not in rows[UNSEEN]], first, served, shares, {})
    share = sides[UNSEEN]["covered"] / len(splits)
    return Report(
        figures={
            "sides": sides,
            "fresh": fresh._asdict(),
            "other_groups": other._asdict(),
            "learnt_rows": learnt._asdict(),
            "num_logged": len(kept),
            "num_fresh": len(traffic.fresh),
            "num_other": len(traffic.other),
        },
        grids=[
            Grid(
                f"{len(splits)} splits of {len(kept)} rows, gain over the first draft in accepted tokens a step",
                [
                    "judged by",
                    "intervals that hold",
                    "too high",
                    "too low",
                    "mean",
                    "spread",
                    "half width",
                    "conversations",
                    "clusters",
                ],
                [[name, *_cells(one)] for name, one in sides.items()],
            )
        ],
        notes=[
            (
                f"{len(traffic.fresh)} fresh requests of the same groups gain {fresh.text()}, "
                f"{len(traffic.other)} of other groups {other.text()}."
            ),
            (
                f"The rows that the served draft learnt from gain {learnt.text()}, "
                f"those that it did not {sides[UNSEEN]['whole']:+.3f}."
            ),
        ],
        verdict=f"{'meets' if share >= AIM else 'misses'} the bar ({AIM:.0%}): {share:.0%} of the intervals hold it.",
    )


def _side(
    kept: Sequence[Sample],
    ids: Collection[str],
    splits: Sequence[Mapping[str, str]],
    first: Scores,
    served: Scores,
    shares: Mapping[str, float],
    fresh: float,
    num_draft_tokens: int,
) -> dict[str, float]:
    """Judge every split by those of its conversations that are among `ids`."""
    judged = [{id: cluster for id, cluster in split.items() if id in ids and id in first} for split in splits]
    if not all(judged):
        raise ValueError(
            f"{sum(not one for one in judged)} of {len(splits)} splits have no conversation to be judged by"
        )
    found = [estimate(one, first, served, shares, num_draft_tokens) for one in judged]
    return {
        **summary(found, fresh),
        "whole": mean_gain([one for one in kept if one.id in ids], first, served, shares, {}).value,
        "conversations": float(np.median([len(one) for one in judged])),
        "clusters": float(np.median([len(set(one.values())) for one in judged])),
    }


def _cells(one: Mapping[str, float]) -> list[str]:
    counts = [f"{one[name]:.0f}" for name in ("covered", "too_high", "too_low")]
    figures = [f"{one['mean']:+.3f}", f"{one['spread']:.3f}", f"{one['half_width']:.3f}"]
    return [*counts, *figures, f"{one['conversations']:.0f}", f"{one['clusters']:.0f}"]


def estimate(
    split: Mapping[str, str], first: Scores, served: Scores, shares: Mapping[str, float], num_draft_tokens: int
) -> Estimate:
    """Return the gain with its 95% interval, as the gate tells it of one window.

    Args:
        split: id to cluster of what is judged by.
        first: id to the first draft's score.
        served: id to the served draft's.
        shares: domain to its share of the traffic.
        num_draft_tokens: K.
    """
    before, after = ([of[id].model_copy(update={"cluster": split[id]}) for id in split] for of in (first, served))
    last = Evidence.start(num_draft_tokens).after(before, after, shares).last
    assert last is not None
    return last


def mean_gain(
    samples: Sequence[Sample], first: Scores, served: Scores, shares: Mapping[str, float], groups: Mapping[str, str]
) -> Mean:
    """Return the mean gain of samples, with its standard error over their groups.

    Args:
        samples: those without a score are left out.
        first: id to the first draft's score.
        served: id to the served draft's.
        shares: domain to its share; one without a sample counts as one without gain.
        groups: id to what its sample belongs to; itself where nothing is said.
    """
    value, variance = 0.0, 0.0
    for domain, share in shares.items():
        ids = [one.id for one in samples if one.domain == domain and one.id in first]
        if not ids:
            continue
        gains = [served[id].accepted / served[id].steps - first[id].accepted / first[id].steps for id in ids]
        mean, sums = float(np.mean(gains)), defaultdict[str, float](float)
        for id, one in zip(ids, gains, strict=True):
            sums[groups.get(id, id)] += one - mean
        value += share * mean
        variance += share**2 * sum(one**2 for one in sums.values()) / len(ids) ** 2
    return Mean(value, math.sqrt(variance))


def summary(found: Sequence[Estimate], fresh: float) -> dict[str, float]:
    """Return how many of the intervals hold a figure, and how they lie."""
    values = np.array([one.value for one in found])
    return {
        "covered": sum(one.low <= fresh <= one.high for one in found),
        "too_high": sum(one.low > fresh for one in found),
        "too_low": sum(one.high < fresh for one in found),
        "mean": float(values.mean()),
        "bias": float(values.mean()) - fresh,
        "spread": float(values.std(ddof=1)),
        "half_width": float(np.median([(one.high - one.low) / 2 for one in found])),
    }
