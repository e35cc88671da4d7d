"""Questions with the target's answers, as files: what drafts are trained on and held to.

An answer given twice counts once, and one API key gives at most its share of what is kept (`tasks.stages.split`).

A directory of kind "samples" holds `train.jsonl`, `held_out.jsonl` and, where traffic was split (`tasks.stages.split`),
`regression.jsonl`: what drafts are held to and never trained on.
"""

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal, Protocol, TypeVar

from infra.artifacts import Artifact, open_artifact
from infra.consent import QueryRow
from infra.querylog import CapturedFiles
from infra.settings import load_settings
from models.core.evaluation.acceptance import rejected_places
from models.core.learning.captured import Captures
from models.core.learning.hidden import Sample
from models.targets import describe
from models.types import MIN_COMPLETION
from tasks.stages.split import cap_per_key
from tasks.stages.task import run_logger

TrafficSplit = Literal["train", "held_out"]
Split = TrafficSplit | Literal["regression"]
SPLITS: tuple[TrafficSplit, ...] = ("train", "held_out")
OfT = TypeVar("OfT", bound="Of")


class Of(Protocol):
    """Something of a domain."""

    @property
    def domain(self) -> str: ...


def by_domain(items: Iterable[OfT]) -> dict[str, list[OfT]]:
    """Return domain to what is of it, in the order given."""
    found: dict[str, list[OfT]] = {}
    for one in items:
        found.setdefault(one.domain, []).append(one)
    return found


def write_samples(directory: Path, part: Split, samples: Iterable[Sample]) -> None:
    """Write one part of an empty "samples" directory."""
    append_samples(directory / f"{part}.jsonl", samples)


def read_samples(artifact: Artifact, part: Split) -> list[Sample]:
    """Read one part of a "samples" artifact; ValueError if its files are not those of the reference."""
    path = open_artifact(artifact) / f"{part}.jsonl"
    if part == "regression" and not path.is_file():
        return []
    with path.open(encoding="utf-8") as file:
        return [Sample(**json.loads(line)) for line in file]


def append_samples(file: Path, samples: Iterable[Sample]) -> None:
    """Add samples to a file that lasts over several runs; a kill cuts its last line at most."""
    with file.open("a", encoding="utf-8") as lines:
        lines.write("".join(json.dumps(sample._asdict(), allow_nan=False) + "\n" for sample in samples))


def read_written(file: Path) -> list[Sample]:
    """Return what was added to a file, and cut off a last line that a kill left half-written; [] without the file."""
    if not file.is_file():
        return []
    whole, _, rest = file.read_bytes().rpartition(b"\n")
    if rest:
        os.truncate(file, len(whole) + bool(whole))
    return [Sample(**json.loads(line)) for line in whole.splitlines()]


def usable(
    rows: Iterable[QueryRow], target_version: int, max_share_per_key: float, min_rows: int
) -> tuple[list[Sample], Counter[str]]:
    """Return rows of one target version, by seq, as samples, and how many were left out for which reason.

    What a key may give is as in `Refresh`; no key is one key too.
    """
    kept, left_out, seen = list[tuple[str | None, Sample]](), Counter[str](), set[str]()
    for row in rows:
        content = json.dumps([row.prompt_ids, row.completion_ids])
        temperature = row.sampling.get("temperature")
        if row.target_version != target_version:
            left_out["answered by another target"] += 1
        elif row.prompt_ids is None or row.completion_ids is None or not isinstance(temperature, int | float):
            left_out["without token ids or temperature"] += 1
        elif len(row.completion_ids) < MIN_COMPLETION:
            left_out["too short"] += 1
        elif content in seen:
            left_out["repeated"] += 1
        else:
            seen.add(content)
            sample = Sample(row.id, row.domain, row.prompt_ids, row.completion_ids, float(temperature))
            if row.drafted_ids is not None and row.accepted is not None:  # else nobody knows what was drafted
                drafted, length = list(map(len, row.drafted_ids)), len(row.completion_ids)
                sample = sample._replace(rejected=rejected_places(drafted, row.accepted, row.matches or [], length))
            kept.append((row.key, sample))
    samples = _within_share(kept, max_share_per_key, min_rows)
    if above := len(kept) - len(samples):
        left_out["above one key's share"] = above
    return samples, left_out


def _within_share(keyed: Sequence[tuple[str | None, Sample]], max_share: float, min_rows: int) -> list[Sample]:
    """Leave out what a key gave above its share; which of its samples stay is up to a hash, not to when they came."""
    of_key: dict[str | None, list[str]] = {}
    for key, sample in keyed:
        of_key.setdefault(key, []).append(sample.id)
    cap = cap_per_key([len(ids) for ids in of_key.values()], max_share, min_rows)
    above = {name for ids in of_key.values() for name in sorted(ids, key=_hashed)[cap:]}
    return [sample for _, sample in keyed if sample.id not in above]


def _hashed(id: str, seed: int = 0) -> bytes:
    return hashlib.sha256(f"{seed} {id}".encode()).digest()


def regression_set_versions(samples: Iterable[Sample]) -> dict[str, str]:
    """Return domain to the version of its regression set: a hash of its members' names and answers."""
    versions = {}
    for domain, members in sorted(by_domain(samples).items()):
        told = sorted(json.dumps([one.id, one.prompt_ids, one.completion_ids]) for one in members)
        versions[domain] = hashlib.sha256("\n".join(told).encode()).hexdigest()[:16]
    return versions


def draw_per_domain(samples: Sequence[Sample], per_domain: int, seed: int) -> list[Sample]:
    """Draw up to `per_domain` samples of each domain, the same ones each time, in the order given."""
    ids = [[one.id for one in of_domain] for of_domain in by_domain(samples).values()]
    drawn = {name for each in ids for name in sorted(each, key=lambda id: _hashed(id, seed))[:per_domain]}
    return [sample for sample in samples if sample.id in drawn]


def captures_of(target_dir: Path) -> Captures:
    """Return the hidden states that the service captured of a target's answers."""
    return Captures(CapturedFiles(load_settings().beside_log).path_of, describe(target_dir).sha256)


def tell_captured(captures: Captures, what: str) -> None:
    """Log how many answers' states were captured, and why the target was run for others; nothing if none was wanted."""
    if captures.counts:
        counts = ", ".join(f"{number} {why}" for why, number in sorted(captures.counts.items()))
        run_logger().info("hidden states of answers to %s: %s", what, counts)
