"""B5: seconds to a held-out τ, against the loop that EAGLE-3 was published with.

    python -m tests.benchmarks.published_loop [--home .redraft] [--samples 100] [--epochs 3] [--longer 4] [--seeds 3]

That loop, as in its authors' repository (SafeAILab/EAGLE, `eagle/traineagle3`): the target reads each batch in each
pass; batches are drawn at random and padded; every position of a sequence, its prompt's as well, goes through the layer
in every unrolled step; the loss, over the answer alone, is a cross-entropy with the target's softmax over the draft's
vocabulary, where that holds the target's choice. Here it has our head, optimizer, schedule, clipping and number of
steps, and the target in the same precision.

Both start from samples and end with a trained head, so ours computes its hidden states anew each time. It is trained
for as many passes and for `--longer` ones; what of these first comes to the published loop's τ is held to its seconds.
Reads the answers that `redraft build` or `redraft demo` left under the home folder. Ends stdout with one JSON line.
"""

import argparse
import json
import math
import platform
import random
import resource
import statistics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm
from transformers import PreTrainedModel

from infra.artifacts import publish
from infra.machine import git_commit
from models.core.checkpoints.loading import load_model
from models.core.evaluation.acceptance import Trace, difference, mean_accepted_length
from models.core.layers.kernels import fast_dtype
from models.core.layers.linears import blocks
from models.core.learning import distill
from models.core.learning.hidden import Sample, length_buckets
from models.drafts import Rows, eagle3
from tasks.stages.samples import read_samples
from tests.benchmarks.distill_speed import newest, traces

K = 3
STEP_DECAY = 0.8


def train_as_published(
    head: eagle3.Eagle3, target_dir: Path, samples: Sequence[Sample], params: distill.Params, seed: int
) -> None:
    """Train `head` in place by the published loop, in as many steps as ours takes."""
    target, tapped = load_model(target_dir, fast_dtype("cpu"), "cpu"), dict[int, Tensor]()
    for tap in head.taps:  # the library's own list holds the last layer's output after the norm only
        blocks(target)[tap - 1].register_forward_hook(lambda *call, tap=tap: tapped.update({tap: call[-1]}))
    trained = [parameter for parameter in head.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, params.learning_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    num_batches, rng = len(length_buckets(samples, params.batch_tokens)), random.Random(seed)
    total, done = params.num_epochs * num_batches, 0
    for _ in range(params.num_epochs):
        order = rng.sample(list(samples), len(samples))
        for number in range(num_batches):
            warm = min(1.0, (done + 1) / total / params.warmup)
            rate = params.learning_rate * warm * max(0.5 * (1 + math.cos(math.pi * done / total)), 0.02)
            for group in optimizer.param_groups:
                group["lr"] = rate
            loss = _loss(head, target, tapped, order[number::num_batches])
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            clip_grad_norm_(trained, params.max_grad_norm)
            optimizer.step()
            done += 1
    head.eval()


def _loss(head: eagle3.Eagle3, target: PreTrainedModel, tapped: dict[int, Tensor], batch: Sequence[Sample]) -> Tensor:
    token_ids = pad_sequence([torch.tensor(sample.token_ids) for sample in batch], batch_first=True)
    with torch.no_grad():
        said = target(input_ids=token_ids, use_cache=False).logits.float()
        hidden = torch.cat([tapped[tap] for tap in head.taps], dim=-1).float()
        known = torch.isin(said.argmax(-1), head.vocabulary)
        probs = said[..., head.vocabulary].softmax(-1)
    index = torch.arange(token_ids.shape[1] - 2).repeat(len(batch))
    sequence = torch.arange(len(batch)).repeat_interleave(token_ids.shape[1] - 2)
    rows = Rows(hidden, torch.nn.functional.pad(token_ids, (0, K + 1)), sequence, index)
    first, last = (torch.tensor([count(sample) for sample in batch])[sequence] for count in (_first, _last))
    total, num_rows = torch.zeros(()), ((index >= first) & (index <= last)).sum()
    for step, unrolled in enumerate(head.unroll(rows, K)):
        after = (index + 1 + step).clamp(max=token_ids.shape[1] - 1)
        counts = (index >= first) & (index + step <= last) & known[sequence, after]
        values = -(probs[sequence, after] * unrolled.logits.log_softmax(-1)).sum(-1)
        total = total + STEP_DECAY**step * (values * counts).sum() / num_rows
    return total


def _first(sample: Sample) -> int:
    return len(sample.prompt_ids) - 1


def _last(sample: Sample) -> int:
    return len(sample.token_ids) - 3


def timed(run: Callable[[], object]) -> tuple[float, float]:
    """Return the seconds, by the clock and of all cores, that something takes."""
    clock, cores = perf_counter(), _core_seconds()
    run()
    return perf_counter() - clock, _core_seconds() - cores


def _core_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def main() -> None:
    """Run the benchmark."""
    options = argparse.ArgumentParser()
    options.add_argument("--home", type=Path, default=Path(".redraft"))
    options.add_argument("--samples", type=int, default=100)
    options.add_argument("--epochs", type=int, default=3)
    options.add_argument("--longer", type=int, default=4)
    options.add_argument("--seeds", type=int, default=3)
    chosen = options.parse_args()
    target = newest(chosen.home / "artifacts" / "target")
    answers = publish(newest(chosen.home / "artifacts" / "samples"), "samples")
    samples, held_out = (read_samples(answers, part)[: chosen.samples] for part in ("train", "held_out"))
    samples = [sample for sample in samples if len(sample.completion_ids) > 2]
    vocab_size = json.loads((target / "config.json").read_text())["vocab_size"]
    counts = np.bincount(np.concatenate([s.completion_ids for s in samples]), minlength=vocab_size)
    ways = {"published": chosen.epochs, "ours": chosen.epochs, "ours, longer": chosen.longer}
    runs: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
    told: dict[str, list[Trace]] = {way: [] for way in ways}
    order = [(seed, way) for seed in range(chosen.seeds) for way in list(ways)[:: 1 if seed % 2 == 0 else -1]]
    for seed, way in tqdm(order, unit="run"):
        with tempfile.TemporaryDirectory() as folder:
            work, params = Path(folder), distill.Params(num_epochs=ways[way])
            head = eagle3.create(eagle3.Params(vocab_size=min(4096, vocab_size)), target, counts)
            if way == "published":
                seconds, core_seconds = timed(lambda: train_as_published(head, target, samples, params, seed))  # noqa: B023
            else:
                seconds, core_seconds = timed(lambda: distill.train(head, target, samples, params, K, work, seed))  # noqa: B023
            scored = traces(head, target, held_out, work)
            told[way] += [one.model_copy(update={"request_id": f"{seed} {one.request_id}"}) for one in scored]
            tau = round(mean_accepted_length(scored), 4)
            runs[way].append({"seconds": round(seconds, 1), "core_seconds": round(core_seconds, 1), "tau": tau})
            tqdm.write(f"seed {seed}, {way}: {runs[way][-1]}")
    seconds_of = {way: statistics.median(run["seconds"] for run in found) for way, found in runs.items()}
    own = list(ways)[1:]
    print(
        json.dumps(
            {
                "benchmark": "B5",
                "commit": git_commit(),
                "device": f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads",
                "samples": len(samples),
                "epochs": ways,
                "seconds": seconds_of,
                "ratio": {way: round(seconds_of["published"] / seconds_of[way], 2) for way in own},
                "tau_gain": {way: difference(told["published"], told[way]).model_dump() for way in own},
                "runs": runs,
            }
        )
    )


if __name__ == "__main__":
    main()
