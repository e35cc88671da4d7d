"""Take a window of served requests, lay aside what is never trained on, and say when it is done with."""

import os
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from pydantic import Field

from infra.artifacts import Artifact
from infra.consent import QueryRow
from infra.database import DatabaseUnavailable
from infra.erasures import Role
from infra.home import home_secret
from infra.machine import process_identity
from infra.querylog import CapturedFiles, QueryLog
from infra.regression_sets import SIZE, Conversation, plan
from infra.settings import load_settings
from infra.trigger_store import now_ms, since
from infra.versions import Pair
from infra.windows import Window
from models.core.layers.kernels import is_out_of_memory
from models.core.learning.hidden import Sample
from models.recipe import Recipe, Refresh
from models.types import Estimate, Frozen
from tasks.stages import cached_step, json_sha256, run_logger, stage_key, table, task
from tasks.stages.samples import (
    SPLITS,
    Split,
    TrafficSplit,
    by_domain,
    draw_per_domain,
    gate_by_own_answers,
    read_samples,
    usable,
    write_samples,
)
from tasks.stages.split import cluster_log, counted, drawn_by, held_out_by, rows_of_others, stands_for


@task
def claim_window(refresh: Refresh) -> Window | None:
    """Claim the next rows of the query log, or return None if too few wait, or too few that are not one key's.

    The claim is this process's: if it fails or dies, the next one gets the same window. A window that failed three
    times is set aside, and the rows after it are claimed. WindowBusy if another process is at work on the window.
    """
    log = QueryLog(load_settings().querylog)
    owner = f"refresh {process_identity(os.getpid())}"
    others = None if log.stats().attempt else rows_of_others(log, refresh, now_ms())
    if others is not None:
        left = since(now_ms(), others.until_ms)
        told = "nothing to do: %d rows are within one key's share, %d are wanted; rows of other keys are waited for, %s"
        run_logger().info(told, others.within, refresh.min_rows, left)
        return None
    window = log.windows.claim(owner, max_rows=refresh.max_rows, min_rows=refresh.min_rows)
    if window is None:
        run_logger().info("nothing to do: %d rows wait, %d are wanted", log.stats().depth, refresh.min_rows)
    else:
        run_logger().info("claimed %d rows, %d to %d", window.num_rows, window.first_seq, window.last_seq)
    return window


@contextmanager
def hold_window(window: Window) -> Iterator[None]:
    """Hold a claimed window until it is done with; an erasure waits meanwhile.

    What goes wrong meanwhile is recorded beside it and raised again. Where somebody stops the run, nothing went wrong,
    and the attempt does not count; nor does one that a device's memory did not suffice for.
    """
    log = QueryLog(load_settings().querylog)
    with log.reading(), log.windows.hold(window):
        try:
            yield
        except Exception as error:
            with suppress(DatabaseUnavailable):  # the log may be what failed; the attempt was counted when it began
                what = " ".join(f"{type(error).__name__}: {error}".split()).removesuffix(":")
                if is_out_of_memory(error):
                    log.windows.withdraw(window)
                    run_logger().warning("a device's memory ran out, which counts as no attempt: %s", what)
                elif log.windows.fail(window, what):
                    told = "rows %d to %d are set aside: no attempt at them got through"
                    run_logger().warning(told, window.first_seq, window.last_seq)
            raise
        except BaseException:
            with suppress(DatabaseUnavailable):
                log.windows.withdraw(window)
            raise


@contextmanager
def reading_rows() -> Iterator[None]:
    """Read rows without a window; an erasure waits meanwhile."""
    with QueryLog(load_settings().querylog).reading():
        yield


@task
def leave_window(window: Window) -> None:
    """Release a window that nothing was trained on for the champion of now; the next run gets it again."""
    QueryLog(load_settings().querylog).windows.withdraw(window)


@task
def advance_cursor(window: Window) -> None:
    """Move the log's cursor past a window, which comes last: until then, a crash only makes it be claimed again.

    Hidden states captured of rows before the cursor go.
    """
    log = QueryLog(load_settings().querylog)
    log.windows.commit(window)
    CapturedFiles(load_settings().beside_log).forget(log.ids(window.last_seq))
    run_logger().info("the cursor is at %d", window.last_seq)


class Parts(Frozen):
    """What a draft is trained on and held to.

    Attributes:
        samples: of kind "samples", with regression sets.
        shares: domain to its share of the traffic, what its keys' shares leave of it.
        fresh: ids of the conversations of regression sets that came with this traffic, by which no draft was gated.
        unlike: domain to how much less likely its imported answers are to the target than its own, in nats a token;
            where that is shown, drafts are held to the target's own answers (`tasks.stages.samples`).
    """

    samples: Artifact
    shares: dict[str, float]
    fresh: tuple[str, ...]
    unlike: dict[str, Estimate] = Field(default_factory=dict)


@task
def hold_out(recipe: Recipe, pair: Pair, window: Window, first_samples: Artifact) -> Parts:
    """Write what a refresh trains on and is held to.

    Training: one split of the window, what the window before held out and, so that nothing is forgotten, older rows of
    each domain and some of the first draft's samples. Held out: the window's other split. Regression: a domain's set,
    to which the window gives some rows before anything is trained on them. What scores stands for as many requests as
    its cluster has in the window, see `counted`. Answers that a grammar constrained are learnt and never score: of
    what the target would have said they tell too little.
    """
    refresh, settings = recipe.refresh, load_settings()
    log, traffic = QueryLog(settings.querylog), _read_traffic(pair, first_samples, window.last_seq)
    older, trained = log.replay(refresh.replay_per_domain, window.first_seq, recipe.seed), traffic.trained
    if (before := log.windows.last()) is not None:
        earlier = [row for row in traffic.rows if row.seq <= before.last_seq]
        was_held_out = held_out_by(traffic.secret, earlier, before, refresh.held_out_fraction, trained)
        held_out = [row.seq for row in traffic.within(before) if was_held_out(row.cluster)]
        older = list({row.seq: row for row in [*older, *log.rows_of(held_out)] if row.consent == "full"}.values())
    fresh = log.rows(window.first_seq, window.last_seq)
    samples = _samples(recipe, pair, [*older, *fresh], traffic)
    structured = {row.id for row in fresh if row.structured}

    seqs = {row.id: row.seq for row in fresh if row.seq is not None}
    usable_seqs = {seqs[sample.id] for sample in samples if sample.id in seqs and sample.id not in structured}
    sets, draw = log.regression_sets, drawn_by(traffic.secret)
    sets.apply(plan(traffic.rows, set(sets.members()), window.first_seq, usable_seqs, trained, draw))
    members = set(sets.members())
    regression, reserved = _regression_sets(pair, log, members, traffic)

    is_held_out = held_out_by(traffic.secret, traffic.rows, window, refresh.held_out_fraction, trained)
    of_window = {row.seq: row for row in traffic.within(window) if row.seq in usable_seqs}
    tests = [row for row in of_window.values() if is_held_out(row.cluster)]
    of_domain = Counter(row.domain for row in of_window.values())
    of_cluster = Counter((row.domain, row.cluster) for row in of_window.values())
    left_out, counts = reserved | {row.cluster for row in tests}, counted(tests, of_domain, draw)
    reserved_here = {
        row.seq: stands_for(of_cluster[row.domain, row.cluster], of_domain[row.domain])
        for row in of_window.values()
        if row.seq in members
    }
    learned = samples + draw_per_domain(traffic.first["train"], refresh.replay_per_domain, recipe.seed)
    parts, unlike = gate_by_own_answers(
        recipe,
        pair.target_files,
        {
            "train": [sample for sample in learned if sample.cluster not in left_out],
            "held_out": [
                one._replace(weight=counts[seqs[one.id]])
                for one in samples
                if seqs.get(one.id) in counts and one.cluster not in reserved
            ],
            "regression": [one._replace(weight=reserved_here.get(seqs.get(one.id, 0), 1.0)) for one in regression],
        },
    )
    own = [sample for sample in samples if sample.id in seqs]
    return _write_parts(parts, own, {one.id for one in own if seqs[one.id] in members}, unlike, structured)


@task
def hold_out_past(recipe: Recipe, pair: Pair, first_samples: Artifact) -> Parts:
    """Write what a draft from elsewhere is held to: the regression sets, and rows new to the champion's line.

    It is gated by all of them in one look, so that the sets are fresh to it; each stands for itself alone, because what
    it was drawn from is past. The training part is empty.
    """
    log = QueryLog(load_settings().querylog)
    cursor = log.windows.cursor()
    rows = [row for row in log.rows(cursor + 1, cursor + recipe.refresh.max_rows) if not row.structured]
    traffic = _read_traffic(pair, first_samples, cursor + recipe.refresh.max_rows)
    regression, reserved = _regression_sets(pair, log, set(log.regression_sets.members()), traffic)
    seen = reserved | {row.cluster for row in traffic.rows if row.seq <= cursor} | traffic.trained
    found = {sample.id: sample for sample in _samples(recipe, pair, rows, traffic) if sample.cluster not in seen}
    of_found = {row.seq for row in rows if row.id in found}
    tests = [row for row in traffic.rows if row.seq in of_found]
    counts = counted(tests, Counter(row.domain for row in tests), drawn_by(traffic.secret))
    fresh = [found[row.id]._replace(weight=counts[row.seq]) for row in rows if row.seq in counts]
    held_to: dict[Split, list[Sample]] = {"train": [], "held_out": fresh, "regression": regression}
    parts, unlike = gate_by_own_answers(recipe, pair.target_files, held_to)
    return _write_parts(parts, fresh + regression, {one.id for one in regression}, unlike)


class _Traffic(NamedTuple):
    """The log's rows up to a window's last one, and the first draft's samples, with their clusters."""

    rows: list[Conversation]
    first: dict[TrafficSplit, list[Sample]]
    secret: bytes

    @property
    def trained(self) -> set[str]:
        """Clusters that the first draft was trained on."""
        return {sample.cluster for sample in self.first["train"]}

    def within(self, window: Window) -> list[Conversation]:
        return [row for row in self.rows if window.first_seq <= row.seq <= window.last_seq]


def _read_traffic(pair: Pair, first_samples: Artifact, last_seq: int) -> _Traffic:
    settings = load_settings()
    secret = home_secret(settings.home)
    first = {side: read_samples(first_samples, side) for side in SPLITS}
    both = first["train"] + first["held_out"]
    clustered = cluster_log(settings.querylog, secret, pair.target_files.path, both, last_seq)
    named = {side: [one._replace(cluster=clustered.first[one.id]) for one in first[side]] for side in SPLITS}
    return _Traffic(clustered.rows, named, secret)


def _samples(recipe: Recipe, pair: Pair, rows: Sequence[QueryRow], traffic: _Traffic) -> list[Sample]:
    """Return what can be trained on or scored, with clusters, within each key's share."""
    refresh = recipe.refresh
    samples, left_out = usable(rows, pair.target.number, refresh.max_share_per_key, refresh.min_rows)
    if left_out:
        run_logger().info("left out: %s", ", ".join(f"{count} {reason}" for reason, count in left_out.items()))
    return _named(samples, rows, traffic)


def _named(samples: Sequence[Sample], rows: Sequence[QueryRow], traffic: _Traffic) -> list[Sample]:
    cluster_of = {row.seq: row.cluster for row in traffic.rows}
    seqs = {row.id: row.seq for row in rows if row.seq is not None}
    return [sample._replace(cluster=cluster_of[seqs[sample.id]]) for sample in samples]


def _regression_sets(
    pair: Pair, log: QueryLog, members: Collection[int], traffic: _Traffic
) -> tuple[list[Sample], set[str]]:
    """Return what drafts are held to in each domain, and the clusters that are therefore never trained on.

    The first draft's held-out conversations fill up the sets that traffic has not filled, as far as no row is alike.
    """
    inside = {row.seq: row for row in traffic.rows if row.seq in members}
    rows = log.rows_of(inside)
    samples = _named(usable(rows, pair.target.number, 1.0, len(rows))[0], rows, traffic) if rows else []
    known = {row.cluster for row in traffic.rows} | traffic.trained
    filling = by_domain(sample for sample in traffic.first["held_out"] if sample.cluster not in known)
    regression, of_traffic = list[Sample](), by_domain(samples)
    for domain in sorted({*of_traffic, *filling}):
        own = of_traffic.get(domain, [])
        regression += own + draw_per_domain(filling.get(domain, []), max(0, SIZE - len(own)), seed=0)
    return regression, {row.cluster for row in inside.values()}


def _write_parts(
    parts: Mapping[Split, Sequence[Sample]],
    traffic: Sequence[Sample],
    reserved: Collection[str],
    unlike: Mapping[str, Estimate],
    structured: Collection[str] = (),
) -> Parts:
    def make(directory: Path, _: Path) -> None:
        for part, samples in parts.items():
            write_samples(directory, part, samples)

    content = {part: [list(sample) for sample in samples] for part, samples in parts.items()}
    params, code = {"sha256": json_sha256(content)}, (make, write_samples)
    of_window = {sample.id for sample in traffic}
    ids = {part: [sample.id for sample in samples] for part, samples in parts.items()}
    roles: dict[Role, list[str]] = {
        "train": [one for one in ids["train"] if one in of_window],
        "replay": [one for one in ids["train"] if one not in of_window],
        "held_out": ids["held_out"],
        "regression": ids["regression"],
    }
    QueryLog(load_settings().querylog).erasures.record_reads(stage_key("window", params, {}, code), roles)
    artifact = cached_step("window", "samples", params, make, code=code)
    by_part = {part: Counter(sample.domain for sample in samples) for part, samples in parts.items()}
    domains = sorted(set().union(*by_part.values()))
    rows = [{"domain": domain, **{part: count[domain] for part, count in by_part.items()}} for domain in domains]
    table("window", rows, "conversations")
    counts = Counter(sample.domain for sample in traffic if sample.id not in structured)
    return Parts(
        samples=artifact,
        shares={name: count / counts.total() for name, count in sorted(counts.items())},
        fresh=tuple(sample.id for sample in traffic if sample.id in reserved),
        unlike=dict(unlike),
    )
