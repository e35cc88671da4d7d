"""How often the interval of a window's gain holds what fresh requests of the same traffic give.

    python -m tests.benchmarks.coverage --splits 20 --prompts 100

Requests are answered that were never logged. Nothing is trained while logs are split: the gain is that of a draft which
the line's first one became on requests of other groups, so that what is logged and what is not are both new to it.

- *Splits of the home's own log*: its rows, each time with a secret of another home, which clusters them, reserves
  regression sets and holds out as a refresh on all of them would. The gate tells its interval of what was held out. The
  truth is the gain on what was never logged.
- *Logs drawn anew*: what one log happens to hold is the same for all splits of it. So half of what was never logged is
  drawn to be a log, with its own secret, and the truth is the gain on the other half.

The served draft's own window is told beside that. Its held-out groups are new to it, while traffic goes on asking for
those that it learnt from, which it serves better. So its interval may lie below the truth; it must not lie above.
"""

import hashlib
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

import numpy as np

from infra.artifacts import open_artifact, publish
from infra.querylog import QueryLog
from infra.registry import open_registry
from infra.regression_sets import plan
from infra.versions import Pair
from infra.windows import Window
from models.core.drafting.draft_families import open_draft
from models.core.evaluation.paired import Score
from models.core.evaluation.scoring import score
from models.core.learning.hidden import Sample
from models.recipe import Refresh
from models.sources import Prompt
from tasks.measure.drift import answers
from tasks.measure.run import Run, files_of, first_pair
from tasks.select_data import choose_more
from tasks.stages.samples import Split as SampleSplit
from tasks.stages.samples import read_samples, usable
from tasks.stages.split import cluster_samples, counted, drawn_by, held_out_by, stands_for
from tests.benchmarks.intervals import Scores, Split, estimate, hold, mean_gain, shares_of
from tests.benchmarks.pupil import teach
from tests.benchmarks.scripts import arguments, open_run, show

OWNER = "coverage"
FIRST, SERVED, PUPIL = "first", "served", "pupil"  # drafts


class Traffic(NamedTuple):
    """What drafts are scored on; a sample's cluster is the group that its prompt belongs to.

    Attributes:
        fresh: requests of the groups that traffic asks for, none of which was logged.
        other: requests of other groups.
        told: what the served draft's window held out and reserved, with clusters and weights.
        logged: the home's own log, its newest rows.
    """

    fresh: list[Sample]
    other: list[Sample]
    told: list[Sample]
    logged: list[Sample]

    @property
    def all(self) -> list[Sample]:
        """Everything in one row, each once."""
        return list({one.id: one for one in (*self.fresh, *self.other, *self.told, *self.logged)}.values())


def measure(run: Run, num_splits: int, num_prompts: int) -> dict[str, Any]:
    """Score the drafts once, and split logs again and again.

    Args:
        run: in its own home.
        num_splits: of the home's own log, and logs that are drawn anew.
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
    seed, fraction = run.recipe.seed, run.recipe.refresh.held_out_fraction
    target_dir = open_artifact(pair.target_files)

    def split_own(number: int) -> Split:
        return judged_by(traffic.logged, f"{seed} split {number}", fraction, target_dir)

    def draw(number: int) -> Split:
        return split(traffic.fresh, number, seed, fraction, target_dir)

    def splits(name: str, make: Callable[[int], Split]) -> list[Split]:
        def made() -> list[Split]:
            found = []
            with run.bar(name, num_splits) as bar:
                for number in range(num_splits):
                    found.append(make(number))
                    bar.advance()
            return found

        return [Split(*row) for row in run.cells.keep(f"splits-{name.replace(' ', '-')}", made)]

    own, drawn = splits("own log", split_own), splits("drawn logs", draw)
    return figures(traffic, scored, own, drawn, run.recipe.num_draft_tokens)


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
    return Traffic(fresh, other, _told(run, served, domains), logged_samples(run.recipe.refresh, log, domains))


def logged_samples(refresh: Refresh, log: QueryLog, domains: Sequence[str]) -> list[Sample]:
    """Return a log's newest rows as a refresh on all of them would take them; a cluster is a row's group.

    Args:
        refresh: how many rows it takes, and how many of one key.
        log: the home's; the target of its newest row is the one whose answers are taken.
        domains: whose rows are taken, of which there is one.
    """
    rows = [row for row in log.rows(1, sys.maxsize) if row.domain in domains][-refresh.max_rows :]
    groups = {row.id: row.group or "" for row in rows}
    samples, _ = usable(rows, rows[-1].target_version or 0, refresh.max_share_per_key, refresh.min_rows)
    return [one._replace(cluster=groups[one.id]) for one in samples]


def _told(run: Run, served: int, domains: Sequence[str]) -> list[Sample]:
    """Return what a draft's window held out and reserved; nothing for one that no window made."""
    window = open_registry(run.settings).get("draft", served).lineage.window
    if window is None:
        return []
    samples = publish(Path(unquote(urlsplit(window.uri).path)), "samples")
    parts: tuple[SampleSplit, ...] = ("held_out", "regression")
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
    """Draw one log, and split it.

    Args:
        fresh: what half is drawn of; clusters are groups.
        number: of the log.
        seed: of the benchmark.
        held_out_fraction: share of the clusters that the gate gets.
        target_dir: whose tokenizer wrote the prompts.
    """
    order = np.random.default_rng([seed, number]).permutation(len(fresh))
    samples = [fresh[place] for place in order[: len(fresh) // 2]]
    return judged_by(samples, f"{seed} log {number}", held_out_fraction, target_dir)


def judged_by(samples: Sequence[Sample], name: str, held_out_fraction: float, target_dir: Path) -> Split:
    """Split a log as a refresh on all of it would.

    Args:
        samples: the log, in the order of time; clusters are groups.
        name: of the home's secret.
        held_out_fraction: share of the clusters that the gate gets.
        target_dir: whose tokenizer wrote the prompts.
    """
    secret = hashlib.sha256(name.encode()).digest()
    rows = cluster_samples(samples, secret, target_dir)
    window = Window(first_seq=1, last_seq=len(rows), num_rows=len(rows), sha256="", owner=OWNER)
    draw, of_domain = drawn_by(secret), Counter(row.domain for row in rows)
    of_cluster = Counter((row.domain, row.cluster) for row in rows)
    regression = [rows[seq - 1] for seq in plan(rows, (), 1, range(1, len(rows) + 1), (), draw).reserved]
    kept = {row.cluster for row in regression}
    is_held_out = held_out_by(secret, rows, window, held_out_fraction, ())
    tests = [row for row in rows if is_held_out(row.cluster) and row.cluster not in kept]
    judged = {row.seq: stands_for(of_cluster[row.domain, row.cluster], of_domain[row.domain]) for row in regression}
    judged |= counted(tests, of_domain, draw)
    return Split(
        [one.id for one in samples],
        {samples[seq - 1].id: (rows[seq - 1].cluster, weight) for seq, weight in judged.items()},
    )


def figures(
    traffic: Traffic,
    scored: Mapping[str, Scores],
    own: Sequence[Split],
    drawn: Sequence[Split],
    num_draft_tokens: int,
) -> dict[str, Any]:
    """Hold the intervals of all splits to what the requests outside of their logs give.

    Args:
        traffic: what was scored.
        scored: draft, which is `FIRST`, `SERVED` or `PUPIL`, to id to its score.
        own: splits of the home's own log.
        drawn: logs that are drawn of what was never logged.
        num_draft_tokens: K.

    Raises:
        ValueError: a log has nothing to be judged by.
    """
    first, fresh = scored[FIRST], traffic.fresh
    shares = shares_of(fresh)
    told_by = {one.id: (one.cluster or one.id, one.weight) for one in traffic.told if one.domain in shares}
    told = estimate(told_by, first, scored[SERVED], shares, num_draft_tokens) if told_by else None
    of_log = shares_of(traffic.logged)
    return {
        "own": hold(own, first, scored[PUPIL], fresh, of_log, num_draft_tokens),
        "logs": hold(drawn, first, scored[PUPIL], fresh, shares, num_draft_tokens),
        "fresh": {name: mean_gain(fresh, first, scored[name], shares)._asdict() for name in (PUPIL, SERVED)},
        "logged": mean_gain(traffic.logged, first, scored[PUPIL], of_log)._asdict(),
        "other_groups": mean_gain(traffic.other, first, scored[SERVED], shares)._asdict(),
        "told": None if told is None else told.model_dump(),
        "num_fresh": len(fresh),
        "num_logged": len(traffic.logged),
        "num_other": len(traffic.other),
    }


def main() -> None:
    """Measure and print."""
    parser = arguments("Hold the interval of a window's gain to fresh requests.")
    parser.add_argument("--splits", type=int, default=100, help="of the log, and logs that are drawn anew")
    parser.add_argument("--prompts", type=int, default=400, help="requests of each domain that were never logged")
    given = parser.parse_args()
    run = open_run("coverage", given)
    found = measure(run, given.splits, given.prompts)
    columns = ["covered", "too_high", "too_low", "mean", "truth", "spread", "half_width", "conversations", "clusters"]
    rows = [[name, *(f"{found[name][column]:.3g}" for column in columns)] for name in ("own", "logs")]
    title = f"{given.splits} intervals of a gain over the first draft, and what fresh requests give"
    show({**run.setup, **found}, title, ["logs", *columns], rows)


if __name__ == "__main__":
    main()
