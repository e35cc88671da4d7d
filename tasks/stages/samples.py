"""Questions with the target's answers, as files: what drafts are trained on and held to.

An answer given twice counts once, and one API key gives at most its share of what is kept (`tasks.stages.split`).

A directory of kind "samples" holds `train.jsonl`, `held_out.jsonl` and, where traffic was split (`tasks.stages.split`),
`regression.jsonl`: what drafts are held to and never trained on.

Imported answers that are not like the target's are found before anything learns from them, and never gated by.
"""

import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal, Protocol, TypeVar

import torch
from transformers import AutoTokenizer

from infra import scrub
from infra.artifacts import Artifact, open_artifact
from infra.consent import ELSEWHERE, QueryRow
from infra.querylog import CapturedFiles
from infra.settings import load_settings
from models.chats import ChatEncoder
from models.core.checkpoints.loading import load_model
from models.core.evaluation.acceptance import rejected_places
from models.core.layers.kernels import fast_dtype
from models.core.learning import answering
from models.core.learning.captured import Captures
from models.core.learning.hidden import Sample
from models.recipe import Recipe
from models.targets import describe, stop_ids
from models.types import MIN_COMPLETION, Estimate
from tasks.stages import cached_step, json_sha256, run_logger, table
from tasks.stages.split import cap_per_key
from tasks.stages.throttle import device_of, throttled

TrafficSplit = Literal["train", "held_out"]
Split = TrafficSplit | Literal["regression"]
SPLITS: tuple[TrafficSplit, ...] = ("train", "held_out")
OfT = TypeVar("OfT", bound="Of")
DIFFERENCES = "differences.json"
Make = Callable[[Path, Path], None]
Samples = Mapping[Split, Sequence[Sample]]


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
    """Log how many answers' states were captured, and why the target was run for others; nothing if none has a file."""
    if captures.counts.keys() - {"missing"}:
        counts = ", ".join(f"{number} {why}" for why, number in sorted(captures.counts.items()))
        run_logger().info("hidden states of answers to %s: %s", what, counts)


def gate_by_own_answers(recipe: Recipe, target: Artifact, parts: Samples) -> tuple[Samples, dict[str, Estimate]]:
    """Return the parts with the target's own answers to what drafts are held to, in domains whose imports are unlike.

    An own answer is dropped, with its row, where the scrubber would change it or nothing in it could be scored. Also
    returns by how many nats a token each such domain's imports are unlike.
    """
    imported = [one for samples in parts.values() for one in samples if one.id.startswith(ELSEWHERE)]
    alone = {(one.domain, one.cluster or one.id): one for one in imported}  # of what is alike, as far as known, one
    asked = draw_per_domain(list(alone.values()), answering.NUM_PROMPTS, recipe.seed)
    found = _differences(recipe, target, asked) if asked else {}
    unlike = {domain: one for domain, one in found.items() if answering.unlike(one)}
    if not unlike:
        return parts, {}
    for domain, one in unlike.items():
        told = "imported answers of %s are unlike the target's: to it a token is %.2f nats less likely than its own,"
        told += " at least %.2f; a draft learns from them, and is gated by the target's own answers"
        run_logger().warning(told, domain, -one.value, -one.high)
    held_to: tuple[Split, Split] = ("held_out", "regression")
    tests = [one for part in held_to for one in parts[part] if one.id.startswith(ELSEWHERE) and one.domain in unlike]
    own = {one.id: one for one in _answers(recipe, target, tests)} if tests else {}
    names = {one.id for one in tests}
    gated: dict[Split, list[Sample]] = {
        part: [_with_answer(one, own) for one in parts[part] if one.id not in names or one.id in own]
        for part in held_to
    }
    return {**parts, **gated}, unlike


def _with_answer(sample: Sample, own: Mapping[str, Sample]) -> Sample:
    return sample._replace(completion_ids=own[sample.id].completion_ids, rejected=None) if sample.id in own else sample


def _differences(recipe: Recipe, target: Artifact, asked: Sequence[Sample]) -> dict[str, Estimate]:
    def make(directory: Path, _: Path) -> None:
        device, target_dir = device_of(recipe.refresh_distill()), open_artifact(target)
        model = load_model(target_dir, fast_dtype(device), device)
        found = {domain: answering.compare(model, of_domain) for domain, of_domain in sorted(by_domain(asked).items())}
        (directory / DIFFERENCES).write_text(json.dumps({domain: one.model_dump() for domain, one in found.items()}))

    made = _produced("unlike", "figures", recipe, target, asked, make)
    told = json.loads((open_artifact(made) / DIFFERENCES).read_text())
    found = {domain: Estimate.model_validate(one) for domain, one in told.items()}
    rows = [
        {"domain": name, "nats a token": round(one.value, 3), "at most": round(one.high, 3)}
        for name, one in found.items()
    ]
    table("imported", rows, "imported answers against the target's own, by the target")
    return found


def _answers(recipe: Recipe, target: Artifact, tests: Sequence[Sample]) -> list[Sample]:
    def make(directory: Path, _: Path) -> None:
        device, target_dir = device_of(recipe.refresh_distill()), open_artifact(target)
        encoder = ChatEncoder.of(AutoTokenizer.from_pretrained(target_dir))
        model = load_model(target_dir, fast_dtype(device), device)
        lengths = [max(len(one.completion_ids), answering.MOST_TOKENS) for one in tests]
        rng, max_len = torch.Generator(device).manual_seed(recipe.seed), recipe.engine.max_model_len
        own = answering.answer(model, tests, lengths, stop_ids(target_dir), max_len, rng)
        long = [one for one in own if len(one.completion_ids) >= MIN_COMPLETION]
        kept = [one for one in long if encoder.rewrite(one.completion_ids, scrub.scrub)[0] == one.completion_ids]
        write_samples(directory, "held_out", kept)

    return read_samples(_produced("own_answers", "samples", recipe, target, tests, make), "held_out")


def _produced(stage: str, kind: str, recipe: Recipe, target: Artifact, asked: Sequence[Sample], make: Make) -> Artifact:
    content = [[one.id, one.prompt_ids, one.completion_ids, one.temperature] for one in asked]
    params = {"asked": json_sha256(content), "max_model_len": recipe.engine.max_model_len, "seed": recipe.seed}
    work = throttled(make, device_of(recipe.refresh_distill()))
    return cached_step(stage, kind, params, work, {"target": target}, (answering, write_samples))
