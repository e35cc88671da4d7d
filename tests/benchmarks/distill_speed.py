"""B5: how fast a draft is trained, what following only accepted rows buys, and which settings learn most in a time.

    python -m tests.benchmarks.distill_speed [--home .redraft] [--samples 120] [--epochs 3] [--seeds 3]
    python -m tests.benchmarks.distill_speed --seconds 40 --way batch_tokens=512 --way batch_tokens=1536

Reads the answers that `redraft build` or `redraft demo` left under the home folder. Ways of training, each other values
of keys of [distill], take turns in one process on the same sequences and the same passes over them, or the same seconds
of training. By default they are following rows that were right so far and, the baseline, unrolling every row K times,
as training-time test is usually done. The last way is what the others are held to. A token is one of a sequence, prompt
included, each epoch anew. Ends stdout with one JSON line.
"""

import argparse
import json
import platform
import resource
import statistics
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from infra.artifacts import publish
from infra.machine import git_commit
from models.core.evaluation import scoring
from models.core.evaluation.acceptance import Trace, difference, mean_accepted_length
from models.core.learning import distill
from models.core.learning.hidden import Sample
from models.drafts import eagle3
from tasks.stages.samples import read_samples


def newest(folder: Path) -> Path:
    """Return the directory that was made last.

    Raises:
        ValueError: there is none.
    """
    made = sorted(
        (path for path in folder.glob("*") if (path / "manifest.json").is_file()), key=lambda p: p.stat().st_mtime
    )
    if not made:
        raise ValueError(f"{folder} is empty; run: redraft build")
    return made[-1]


def traces(head: eagle3.Eagle3, target: Path, samples: list[Sample], work: Path) -> list[Trace]:
    """Return what serving `samples` at K=3 would accept."""
    return scoring.trace(head, target, samples, 3, work / "held_out")


def parse(way: str) -> dict[str, Any]:
    """Return the keys of [distill] that a way names, such as "batch_tokens=512,follow=all"."""
    pairs = (pair.partition("=") for pair in way.split(","))
    return {key: json.loads(value) if value[:1].isdigit() else value for key, _, value in pairs}


def main() -> None:
    """Run the benchmark."""
    options = argparse.ArgumentParser()
    options.add_argument("--home", type=Path, default=Path(".redraft"))
    options.add_argument("--samples", type=int, default=120)
    options.add_argument("--epochs", type=int, default=3)
    options.add_argument("--seconds", type=float, help="of training, in place of passes")
    options.add_argument("--seeds", type=int, default=3)
    options.add_argument("--threads", type=int, default=0)
    options.add_argument("--way", action="append", help="keys of [distill], such as follow=all; the last is held to")
    chosen = options.parse_args()
    ways = chosen.way or ["follow=accepted", "follow=all"]
    length = {"num_epochs": chosen.epochs, "num_threads": chosen.threads}
    if chosen.seconds:
        length |= {"num_epochs": 1000, "max_minutes": chosen.seconds / 60}
    target = newest(chosen.home / "artifacts" / "target")
    answers = publish(newest(chosen.home / "artifacts" / "samples"), "samples")
    samples, held_out = (read_samples(answers, part)[: chosen.samples] for part in ("train", "held_out"))
    vocab_size = json.loads((target / "config.json").read_text())["vocab_size"]
    counts = np.bincount(np.concatenate([s.completion_ids for s in samples]), minlength=vocab_size)
    runs: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
    told: dict[str, list[Trace]] = {way: [] for way in ways}
    hidden_tokens_per_s = 0.0
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        for seed in range(chosen.seeds):
            for way in ways if seed % 2 == 0 else ways[::-1]:
                head = eagle3.create(eagle3.Params(vocab_size=min(4096, vocab_size)), target, counts)
                report = distill.train(head, target, samples, distill.Params(**length | parse(way)), 3, work, seed)
                hidden_tokens_per_s = max(hidden_tokens_per_s, report.hidden_tokens_per_s)
                scored = traces(head, target, held_out, work)
                tau = round(mean_accepted_length(scored), 4)
                told[way] += [one.model_copy(update={"request_id": f"{seed} {one.request_id}"}) for one in scored]
                found = {"tokens_per_s": report.tokens_per_s, "seconds": report.seconds, "steps": report.num_steps}
                runs[way].append({name: round(value, 1) for name, value in found.items()} | {"tau": tau})
                looks = "".join(f", {one:.3f}" for _, one in report.taus)
                print(f"seed {seed}, {way}: {runs[way][-1]}{' looks' if looks else ''}{looks}", flush=True)
    medians = {way: statistics.median(run["tokens_per_s"] for run in found) for way, found in runs.items()}
    gains = {way: difference(told[ways[-1]], told[way]).model_dump() for way in ways[:-1]}
    print(
        json.dumps(
            {
                "benchmark": "B5",
                "commit": git_commit(),
                "device": f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads",
                "samples": len(samples),
                "hidden_tokens_per_s": round(hidden_tokens_per_s, 1),
                "train_tokens_per_s": medians,
                "ratio": round(medians[ways[0]] / medians[ways[-1]], 3),
                "tau_gain": gains,
                "runs": runs,
                "peak_memory_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
            }
        )
    )


if __name__ == "__main__":
    main()
