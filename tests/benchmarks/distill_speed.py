"""B5: how fast a draft is trained, and what following only accepted rows buys.

    python -m tests.benchmarks.distill_speed [--home .redraft] [--samples 120] [--epochs 3] [--seeds 3]

Reads the answers that `redraft build` or `redraft demo` left under the home folder. The two ways of training take turns
in one process on the same sequences and the same number of optimizer steps; the baseline unrolls every row K times, as
training-time test is usually done. A token is one of a sequence, prompt included, each epoch anew. Ends stdout with one
JSON line.
"""

import argparse
import json
import platform
import resource
import statistics
import tempfile
from pathlib import Path

import numpy as np
import torch

from infra.artifacts import publish
from infra.machine import git_commit
from models import distill, scoring
from models.drafts import eagle3
from models.hidden import Sample
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


def tau(head: eagle3.Eagle3, target: Path, samples: list[Sample], work: Path) -> float:
    """Return τ at K=3 on `samples`."""
    scores = scoring.score(head, target, samples, 3, work / "held_out")
    return 1 + sum(s.accepted for s in scores) / sum(s.steps for s in scores)


def main() -> None:
    """Run the benchmark."""
    options = argparse.ArgumentParser()
    options.add_argument("--home", type=Path, default=Path(".redraft"))
    options.add_argument("--samples", type=int, default=120)
    options.add_argument("--epochs", type=int, default=3)
    options.add_argument("--seeds", type=int, default=3)
    chosen = options.parse_args()
    target = newest(chosen.home / "artifacts" / "target")
    answers = publish(newest(chosen.home / "artifacts" / "samples"), "samples")
    samples, held_out = (read_samples(answers, part)[: chosen.samples] for part in ("train", "held_out"))
    vocab_size = json.loads((target / "config.json").read_text())["vocab_size"]
    counts = np.bincount(np.concatenate([s.token_ids for s in samples]), minlength=vocab_size)
    results: dict[str, dict[str, list[float]]] = {}
    hidden_tokens_per_s = 0.0
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        for seed in range(chosen.seeds):
            for follow in ("accepted", "all") if seed % 2 == 0 else ("all", "accepted"):
                head = eagle3.create(eagle3.Params(vocab_size=min(4096, vocab_size)), target, counts)
                params = distill.Params(num_epochs=chosen.epochs, follow=follow)
                report = distill.train(head, target, samples, params, 3, work, seed)
                hidden_tokens_per_s = max(hidden_tokens_per_s, report.hidden_tokens_per_s)
                found = results.setdefault(follow, {"tokens_per_s": [], "tau": []})
                found["tokens_per_s"].append(round(report.tokens_per_s, 1))
                found["tau"].append(round(tau(head, target, held_out, work), 4))
                print(f"seed {seed}, {follow}: {found['tokens_per_s'][-1]} tokens/s, τ {found['tau'][-1]}", flush=True)
    medians = {name: statistics.median(found["tokens_per_s"]) for name, found in results.items()}
    print(
        json.dumps(
            {
                "benchmark": "B5",
                "commit": git_commit(),
                "device": f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads",
                "samples": len(samples),
                "epochs": chosen.epochs,
                "hidden_tokens_per_s": round(hidden_tokens_per_s, 1),
                "train_tokens_per_s": medians,
                "ratio": round(medians["accepted"] / medians["all"], 3),
                "runs": results,
                "peak_memory_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
            }
        )
    )


if __name__ == "__main__":
    main()
