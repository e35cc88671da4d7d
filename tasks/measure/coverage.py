"""How often the interval of a window's gain holds what fresh requests of the same traffic give, on splits of a log.

Each split has a secret of its own, which clusters the log, reserves probes and holds out as a refresh on all of it
would, and the gate tells its interval of what was held out. Nothing is trained for a split: the drafts are fixed, and
scored once. The truth is what they gain over the line's first draft on requests that were never logged, from the groups
that the logged ones came from.

Two drafts are held to it. One learns from as many requests of *other* groups as the recipe holds out, so that all of
the log and all of the truth is new to it: its intervals should hold the truth in 95 of 100 splits. The other is the
served one, judged by the rows that it did not learn from. Their groups are new to it, while traffic goes on asking for
those that it has learnt from, which it serves better. So its interval may lie below the truth; it must not lie above.
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
from tasks.measure.pupil import teach
from tasks.measure.run import Run
from tasks.register import first_samples
from tasks.select_data import choose_more
from tasks.stages.samples import Part, read_samples, usable
from tasks.stages.split import cluster_log, counted, drawn_by, held_out_by

TITLE, QUESTION = "coverage", "does the interval of a window's gain hold what fresh requests give?"
AIM = 0.93
FIRST, SERVED, PUPIL = "first", "served", "pupil"  # drafts
NEW, UNSEEN, ALL = (
    "a draft that learnt from other groups, all rows",
    "the served draft, rows that it did not learn from",
    "the served draft, all rows",
)

Scores = dict[str, Score]
Split = Mapping[str, tuple[str, float]]  # id to cluster and weight of what is judged by


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
    drafts = {
        FIRST: open_artifact(pair.draft_files),
        SERVED: open_artifact(files_of(run.settings, "draft", served)),
        PUPIL: _pupil(run, pair, traffic.other),
    }
    scored = {name: _scores(run, pair, directory, traffic.all, name) for name, directory in drafts.items()}
    unseen = run.cells.keep("unseen", lambda: _unseen(run, served, log))
    splits = run.cells.keep("splits", lambda: _splits(run, pair, traffic.logged, num_splits))
    log.close()
    return make_report(traffic, scored, unseen, splits, run.recipe.num_draft_tokens)


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


def _seqs(run: Run) -> dict[str, int]:
    """Return id to seq of the log's rows."""
    log = QueryLog(run.settings.querylog)
    found = {row.id: row.seq for row in log.rows(1, sys.maxsize) if row.seq is not None}
    log.close()
    return found


def _splits(run: Run, pair: Pair, logged: Sequence[Sample], num_splits: int) -> list[Split]:
    """Return, for each secret, what a refresh on the whole log would have judged by."""
    samples = first_samples(pair.draft)
    learnt, both = read_samples(samples, "train"), [*read_samples(samples, "train"), *read_samples(samples, "held_out")]
    made: list[Split] = []
    seqs, fraction = _seqs(run), run.recipe.refresh.held_out_fraction
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
            judged = dict.fromkeys(reserved, 1.0) | counted(tests, drawn_by(secret))
            of_sample = {one.id: seqs[one.id] for one in logged}
            made.append({id: (cluster_of[seq], judged[seq]) for id, seq in of_sample.items() if seq in judged})
            bar.advance()
    return made


def make_report(
    traffic: Traffic,
    scored: Mapping[str, Scores],
    unseen: Sequence[str],
    splits: Sequence[Split],
    num_draft_tokens: int,
) -> Report:
    """Hold the intervals of all splits to what fresh requests give.

    Args:
        traffic: what was scored.
        scored: draft, which is `FIRST`, `SERVED` or `PUPIL`, to id to its score.
        unseen: ids of the rows that the served draft did not learn from.
        splits: what each judges by.
        num_draft_tokens: K.

    Raises:
        ValueError: a split has nothing to be judged by.
    """
    first = scored[FIRST]
    kept = [sample for sample in traffic.logged if sample.id in first]
    everything, not_learnt = {sample.id for sample in kept}, set(unseen)
    shares = {domain: count / len(kept) for domain, count in Counter(sample.domain for sample in kept).items()}

    def gained(samples: Sequence[Sample], name: str) -> Mean:
        return mean_gain(samples, first, scored[name], shares, traffic.groups)

    fresh = {name: gained(traffic.fresh, name) for name in (PUPIL, SERVED)}
    sides = {
        row: _side(kept, ids, splits, first, scored[name], shares, fresh[name].value, num_draft_tokens)
        for row, name, ids in (
            (NEW, PUPIL, everything),
            (UNSEEN, SERVED, not_learnt),
            (ALL, SERVED, everything),
        )
    }
    other, learnt = gained(traffic.other, SERVED), gained([one for one in kept if one.id not in not_learnt], SERVED)
    held, above = sides[NEW]["covered"] / len(splits), sides[UNSEEN]["too_high"] / len(splits)
    return Report(
        figures={
            "sides": sides,
            "fresh": {name: one._asdict() for name, one in fresh.items()},
            "other_groups": other._asdict(),
            "learnt_rows": learnt._asdict(),
            "num_logged": len(kept),
            "num_fresh": len(traffic.fresh),
            "num_other": len(traffic.other),
        },
        grids=[
            Grid(
                f"{len(splits)} splits of {len(kept)} rows, gain over the first draft in accepted tokens a step",
                ["draft, judged by", "hold it", "too high", "too low", "mean", "spread", "half width", "judged by"],
                [[name, *_cells(one)] for name, one in sides.items()],
            )
        ],
        notes=[
            (
                f"{len(traffic.fresh)} fresh requests of the logged groups gain {fresh[PUPIL].text()} with the draft "
                f"that learnt from other groups, {fresh[SERVED].text()} with the served one."
            ),
            f"The served one gains {other.text()} on {len(traffic.other)} requests of other groups.",
            (
                f"The rows that the served draft learnt from gain {learnt.text()}, "
                f"those that it did not {sides[UNSEEN]['whole']:+.3f}."
            ),
        ],
        verdict=(
            f"{'meets' if held >= AIM and above <= 1 - AIM else 'misses'} the bar ({AIM:.0%}): {held:.0%} of the "
            f"intervals hold the gain of a draft that learnt from none of the log; {above:.0%} of the served draft's "
            "promise too much."
        ),
    )


def _side(
    kept: Sequence[Sample],
    ids: Collection[str],
    splits: Sequence[Split],
    first: Scores,
    served: Scores,
    shares: Mapping[str, float],
    fresh: float,
    num_draft_tokens: int,
) -> dict[str, float]:
    """Judge every split by those of its conversations that are among `ids`."""
    judged = [{id: said for id, said in split.items() if id in ids and id in first} for split in splits]
    if not all(judged):
        raise ValueError(
            f"{sum(not one for one in judged)} of {len(splits)} splits have no conversation to be judged by"
        )
    found = [estimate(one, first, served, shares, num_draft_tokens) for one in judged]
    return {
        **summary(found, fresh),
        "whole": mean_gain([one for one in kept if one.id in ids], first, served, shares, {}).value,
        "conversations": float(np.median([len(one) for one in judged])),
        "clusters": float(np.median([len({cluster for cluster, _ in one.values()}) for one in judged])),
    }


def _cells(one: Mapping[str, float]) -> list[str]:
    counts = [f"{one[name]:.0f}" for name in ("covered", "too_high", "too_low")]
    figures = [f"{one['mean']:+.3f}", f"{one['spread']:.3f}", f"{one['half_width']:.3f}"]
    return [*counts, *figures, f"{one['conversations']:.0f} of {one['clusters']:.0f} clusters"]


def estimate(
    split: Split, first: Scores, served: Scores, shares: Mapping[str, float], num_draft_tokens: int
) -> Estimate:
    """Return the gain with its 95% interval, as the gate tells it of one window.

    Args:
        split: what is judged by.
        first: id to the first draft's score.
        served: id to that of the draft that is held against it.
        shares: domain to its share of the traffic.
        num_draft_tokens: K.
    """
    before, after = (
        [of[id].model_copy(update={"cluster": cluster, "weight": weight}) for id, (cluster, weight) in split.items()]
        for of in (first, served)
    )
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
        served: id to that of the draft that is held against it.
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
