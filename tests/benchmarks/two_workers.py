"""Whether two processes take the steps that one takes: the default head, on the default target's states, in float32.

    python -m tests.benchmarks.two_workers TARGET [--steps 200]

Prints the most that a step's loss, and the mean of the gradients, differ by, and the same of two mistakes that it must
tell: gradients that are added up, and processes whose own means count alike. Ends with one JSON line.
"""

import argparse
import json
import tempfile
from functools import partial
from pathlib import Path

import numpy as np
import torch
from transformers import AutoTokenizer

from infra.machine import describe_machine
from models.core.learning import distill
from models.core.learning.hidden import Sample
from models.core.learning.loop import Workers
from models.drafts import eagle3
from tests.models.core.learning.test_loop import Summed, Unweighted, of_one, of_two, off

NUM_DRAFT_TOKENS = 3
PROMPT, WHOLE = 24, (64, 128)  # tokens


def texts(target: Path) -> list[Sample]:
    """Return pieces of this interpreter's own sources, of several lengths."""
    ids = AutoTokenizer.from_pretrained(target)(Path(argparse.__file__).read_text())["input_ids"]
    found, start = list[Sample](), 0
    while len(found) < 60:
        length = WHOLE[0] + 13 * len(found) % (WHOLE[1] - WHOLE[0])
        found.append(
            Sample(f"{len(found):02d}", "code", ids[start : start + PROMPT], ids[start + PROMPT : start + length])
        )
        start += length
    return found


def train(steps: int, target: Path, samples: list[Sample], workers: Workers, work: Path) -> list[tuple[int, float]]:
    """Train a new head, and return the loss of each step as a running mean."""
    tokens = np.concatenate([one.completion_ids for one in samples])
    head = eagle3.create(eagle3.Params(), target, np.bincount(tokens, minlength=49152))
    params = distill.Params(num_epochs=1, min_steps=steps, num_threads=1, checkpoint_s=0, max_grad_norm=1e9)
    return distill.train(head, target, samples, params, NUM_DRAFT_TOKENS, work, workers=workers).losses


def main() -> None:
    """Train three times by two and once by one, and print how far they are apart."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("target", type=Path)
    parser.add_argument("--steps", type=int, default=200)
    given = parser.parse_args()
    torch.set_num_threads(1)
    samples, run, figures = texts(given.target), partial(train, given.steps), {}
    with tempfile.TemporaryDirectory() as folder:
        one = of_one(run, given.target, samples, Path(folder) / "one")
        for name, made in {"two": Workers, "summed": Summed, "unweighted": Unweighted}.items():
            two = of_two(run, made, given.target, samples, Path(folder) / name)
            losses, gradients = off(one, two)
            figures[name] = {"loss": float(f"{losses:.2g}"), "gradients": float(f"{gradients:.2g}")}
            print(name, figures[name], f"of {len(one.losses)} steps", flush=True)
    print(json.dumps({"figures": figures, "steps": len(one.losses), "machine": describe_machine()}))


if __name__ == "__main__":
    main()
