"""Questions with the target's answers, as files: what drafts are trained on and held to.

Whoever floods the service must not write the next draft alone: an answer given twice counts once, and of one API key's
rows only so many are taken. The held-out side has the first draft's conversations too, which no client can write.

A directory of kind "samples" holds `train.jsonl` and `held_out.jsonl`. Traffic is put on a side by a hash of the prompt
alone, so the same question never sits on both, whenever it is asked again.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

from infra.artifacts import Artifact, open_artifact
from infra.consent import QueryRow
from models.hidden import Sample

Part = Literal["train", "held_out"]
# A token from the prompt, one that is drafted and one after it: less has nothing to learn from or to score.
MIN_COMPLETION = 3


def write_samples(directory: Path, part: Part, samples: Iterable[Sample]) -> None:
    """Write one part of a "samples" directory."""
    with (directory / f"{part}.jsonl").open("w", encoding="utf-8") as file:
        for sample in samples:
            file.write(json.dumps(sample._asdict(), allow_nan=False) + "\n")


def read_samples(artifact: Artifact, part: Part) -> list[Sample]:
    """Read one part of a "samples" artifact; ValueError if its files are not those of the reference."""
    with (open_artifact(artifact) / f"{part}.jsonl").open(encoding="utf-8") as file:
        return [Sample(**json.loads(line)) for line in file]


def usable(
    rows: Iterable[QueryRow], target_version: int, max_share_per_key: float
) -> tuple[list[Sample], Counter[str]]:
    """Turn rows of the query log into samples, without those that can't be trained on.

    Args:
        rows: by seq.
        target_version: whose answers they must be.
        max_share_per_key: see `Refresh`.

    Returns:
        The samples, and how many rows were left out for which reason.
    """
    kept: list[tuple[str | None, Sample]] = []
    left_out: Counter[str] = Counter()
    seen: set[str] = set()
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
            kept.append((row.key, sample))
    samples = _within_share(kept, max_share_per_key)
    if above := len(kept) - len(samples):
        left_out["above one key's share"] = above
    return samples, left_out


def _within_share(keyed: Sequence[tuple[str | None, Sample]], max_share: float) -> list[Sample]:
    """Leave out what a key gave above its share; which of its samples stay is up to a hash, not to when they came."""
    of_key: dict[str | None, list[str]] = {}
    for key, sample in keyed:
        of_key.setdefault(key, []).append(sample.id)
    cap = max(1, int(max_share * len(keyed)))
    above: set[str] = set()
    for key, ids in of_key.items():
        if key is not None and len(of_key) > 1:
            above.update(sorted(ids, key=_hashed)[cap:])
    return [sample for _, sample in keyed if sample.id not in above]


def _hashed(id: str, seed: int = 0) -> bytes:
    return hashlib.sha256(f"{seed} {id}".encode()).digest()


def part_of(prompt_ids: Sequence[int], held_out_fraction: float) -> Part:
    """Return the side that a prompt is on."""
    digest = hashlib.sha256(json.dumps(list(prompt_ids)).encode()).digest()
    return "held_out" if int.from_bytes(digest[:8]) / 2**64 < held_out_fraction else "train"


def draw_per_domain(samples: Sequence[Sample], per_domain: int, seed: int) -> list[Sample]:
    """Draw up to `per_domain` samples of each domain, the same ones each time, in the order given."""
    drawn: set[str] = set()
    for domain in {sample.domain for sample in samples}:
        ids = [sample.id for sample in samples if sample.domain == domain]
        drawn.update(sorted(ids, key=lambda id: _hashed(id, seed))[:per_domain])
    return [sample for sample in samples if sample.id in drawn]
