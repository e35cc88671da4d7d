"""Take a window of served requests and lay aside what is never trained on."""

import hashlib
import os
import sqlite3
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from prefect import task
from prefect.cache_policies import NO_CACHE

from infra.artifacts import Artifact
from infra.consent import QueryRow
from infra.manifest import canonical_json
from infra.processes import process_identity
from infra.querylog import QueryLog
from infra.registry import Pair
from infra.settings import load_settings
from infra.windows import Window
from models.hidden import Sample
from models.recipe import Recipe, Refresh
from tasks.stages import produce
from tasks.stages.reporting import run_logger, table
from tasks.stages.samples import Part, draw_per_domain, part_of, read_samples, usable, write_samples


@task(cache_policy=NO_CACHE)
def claim_window(refresh: Refresh) -> Window | None:
    """Claim the next rows of the query log, or return None if too few wait.

    The claim is this process's: if it fails or dies, the next one gets the same window. A window that failed three
    times is set aside, and the rows after it are claimed.

    Raises:
        WindowBusy: another process is at work on the window.
    """
    log = QueryLog(load_settings().querylog)
    owner = f"refresh {process_identity(os.getpid())}"
    window = log.claim(owner, max_rows=refresh.max_rows, min_rows=refresh.min_rows)
    if window is None:
        run_logger().info("nothing to do: %d rows wait, %d are wanted", log.stats().depth, refresh.min_rows)
    else:
        run_logger().info("claimed %d rows, %d to %d", window.num_rows, window.first_seq, window.last_seq)
    return window


@contextmanager
def hold_window(window: Window) -> Iterator[None]:
    """Hold a claimed window until it is done with.

    What goes wrong meanwhile is recorded beside it and raised again. Where somebody stops the run, nothing went wrong,
    and the attempt does not count.
    """
    log = QueryLog(load_settings().querylog)
    with log.hold(window):
        try:
            yield
        except Exception as error:
            with suppress(sqlite3.Error):  # the log may be what failed; the attempt was counted when it began
                if log.fail(window, _one_line(error)):
                    told = "rows %d to %d are set aside: no attempt at them got through"
                    run_logger().warning(told, window.first_seq, window.last_seq)
            raise
        except BaseException:
            with suppress(sqlite3.Error):
                log.withdraw(window)
            raise


@task(cache_policy=NO_CACHE)
def leave_window(window: Window) -> None:
    """Let go of a window that nothing came of, through no fault of its own; the next run gets it again."""
    QueryLog(load_settings().querylog).withdraw(window)


def _one_line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split()).removesuffix(":")


@task(cache_policy=NO_CACHE)
def hold_out(recipe: Recipe, pair: Pair, window: Window, first_samples: Artifact) -> Artifact:
    """Write what a refresh trains on and is held to; an artifact of kind "samples".

    Training: the window and, so that nothing is forgotten, older rows of each domain and some of the first draft's
    samples. Held out: the same sources' other side.
    """
    log = QueryLog(load_settings().querylog)
    rows = log.replay(recipe.refresh.replay_per_domain, window.first_seq, recipe.seed)
    rows += log.rows(window.first_seq, window.last_seq)
    return _write_parts(recipe, pair, rows, first_samples)


@task(cache_policy=NO_CACHE)
def hold_out_past(recipe: Recipe, pair: Pair, first_samples: Artifact) -> Artifact:
    """Write what a draft from elsewhere is held to: the held-out part of all that the champion's line was trained on.

    Returns:
        an artifact of kind "samples".
    """
    log = QueryLog(load_settings().querylog)
    rows = log.replay(recipe.refresh.max_rows, log.cursor() + 1, recipe.seed)
    return _write_parts(recipe, pair, rows, first_samples)


def _write_parts(recipe: Recipe, pair: Pair, rows: Sequence[QueryRow], first_samples: Artifact) -> Artifact:
    refresh = recipe.refresh
    traffic, left_out = usable(rows, pair.target.number, refresh.max_share_per_key, refresh.min_rows)
    if left_out:
        run_logger().info("left out: %s", ", ".join(f"{count} {reason}" for reason, count in left_out.items()))
    parts: dict[Part, list[Sample]] = {"train": [], "held_out": []}
    for sample in traffic:
        parts[part_of(sample.prompt_ids, refresh.held_out_fraction)].append(sample)
    first_train = draw_per_domain(read_samples(first_samples, "train"), refresh.replay_per_domain, recipe.seed)
    parts["train"] += _not_asked_in(parts["held_out"], first_train)
    parts["held_out"] += _not_asked_in(parts["train"], read_samples(first_samples, "held_out"))

    def make(directory: Path, _: Path) -> None:
        for part, samples in parts.items():
            write_samples(directory, part, samples)

    content = canonical_json({part: [list(sample) for sample in samples] for part, samples in parts.items()})
    artifact = produce(
        stage="window",
        kind="samples",
        params={"sha256": hashlib.sha256(content).hexdigest()},
        inputs={},
        code=(__name__, "tasks.stages.samples"),
        make=make,
    )
    _show(parts)
    return artifact


def _not_asked_in(others: Sequence[Sample], samples: Sequence[Sample]) -> list[Sample]:
    asked = {tuple(other.prompt_ids) for other in others}
    return [sample for sample in samples if tuple(sample.prompt_ids) not in asked]


def _show(parts: Mapping[Part, Sequence[Sample]]) -> None:
    counts = {part: Counter(sample.domain for sample in samples) for part, samples in parts.items()}
    domains = sorted(set().union(*counts.values()))
    rows = [{"domain": domain, **{part: count[domain] for part, count in counts.items()}} for domain in domains]
    table("window", rows, "conversations")
