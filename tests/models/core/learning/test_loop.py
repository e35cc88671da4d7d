from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from models.core.learning import distill, training
from models.core.learning.hidden import Sample
from models.core.learning.loop import Workers
from models.drafts import eagle3
from models.params import TrainingParams
from models.regimes import layer_dropout
from tests.models.drafts.answered import answers_of, prompts

pytestmark = pytest.mark.slow

TOLERANCE = 1e-3


class Summed(Workers):
    """The mistake of adding up gradients of which the mean is wanted."""

    def joined(self, module: torch.nn.Module) -> torch.nn.Module:
        joined = super().joined(module)
        joined.register_comm_hook(None, _summed)
        return joined


class Unweighted(Workers):
    """The mistake of taking each process's own mean for its part of the batch's."""

    def share(self, batch):  # type: ignore[no-untyped-def]
        own, weight = super().share(batch)
        return own, weight * len(batch) / (self.size * len(own))


def _summed(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    assert work is not None
    return work.get_future().then(lambda done: done.value()[0])


class Run(NamedTuple):
    """What the first process computed: each step's loss, and the last checkpoint's tensors."""

    losses: list[float]
    tensors: dict[str, torch.Tensor]


Found = Callable[[str], tuple[Run, Run]]


def distilled(target: Path, samples: list[Sample], workers: Workers, work: Path) -> list[tuple[int, float]]:
    counts = np.bincount(np.concatenate([s.token_ids for s in samples]), minlength=259)
    head = eagle3.create(eagle3.Params(vocab_size=128), target, counts)
    # Three samples a batch at most, so that shares differ, and a bound that no gradient comes to.
    params = distill.Params(num_epochs=4, batch_tokens=120, num_threads=1, checkpoint_s=0, max_grad_norm=1e9)
    return distill.train(head, target, samples, params, 3, work, workers=workers).losses


def pretrained(target: Path, samples: list[Sample], workers: Workers, work: Path) -> list[tuple[int, float]]:
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    params = TrainingParams(num_epochs=4, batch_tokens=120, checkpoint_s=1e-9, max_grad_norm=1e9)
    return training.train(model, [s.token_ids for s in samples], params, work_dir=work, workers=workers).losses


WAYS: dict[str, tuple[Callable[..., list[tuple[int, float]]], Callable[..., Workers]]] = {
    "draft": (distilled, Workers),
    "model": (pretrained, Workers),
    "shards": (pretrained, partial(Workers, sharded=True)),
}
MISTAKES = {"summed": (distilled, Summed), "unweighted": (distilled, Unweighted)}


def _process(rank: int, out: Path, target: Path, samples: list[Sample]) -> None:
    """Train in every way, one after the other: starting a process takes longer than that."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{out}/met", rank=rank, world_size=2)
    for way, (train, made) in (WAYS | MISTAKES).items():
        losses = train(target, samples, made(rank, 2), out / f"{way}{rank}")
        if rank == 0:
            torch.save(losses, out / f"{way}.pt")
    dist.destroy_process_group()


def _found(means: list[tuple[int, float]], work: Path) -> Run:
    """Undo the running mean, which hides what one step is off by."""
    values = [mean for _, mean in means]
    each = [values[0], *((now - 0.95 * before) / 0.05 for before, now in pairwise(values))]
    return Run(each, load_file(work / "checkpoint.safetensors"))


def off(one: Run, other: Run) -> tuple[float, float]:
    """Return how far two runs are apart: the most of any step's loss, and, relatively, the gradients' running mean."""
    assert len(one.losses) == len(other.losses) > 10
    losses = max(abs(a - b) for a, b in zip(one.losses, other.losses, strict=True))
    moments = [name for name in one.tensors if name.startswith("exp_avg/")]
    apart = sum(float((one.tensors[name] - other.tensors[name]).square().sum()) for name in moments)
    size = sum(float(one.tensors[name].square().sum()) for name in moments)
    return losses, (apart / size) ** 0.5


@pytest.fixture(scope="module")
def samples(tiny_target: Path) -> list[Sample]:
    return answers_of(tiny_target, prompts(19))


@pytest.fixture(scope="module")
def found(tiny_target: Path, samples: list[Sample], tmp_path_factory: pytest.TempPathFactory) -> Found:
    """Return what gives the runs of one process and of two in a way."""
    out = tmp_path_factory.mktemp("trained")
    mp.spawn(_process, (out, tiny_target, samples), nprocs=2)

    def runs(way: str) -> tuple[Run, Run]:
        train, alone = (WAYS | MISTAKES)[way][0], out / f"{way}-alone"
        one = _found(train(tiny_target, samples, Workers(), alone), alone)
        return one, _found(torch.load(out / f"{way}.pt"), out / f"{way}0")

    return runs


@pytest.mark.parametrize("way", WAYS)
def test_two_take_the_steps_of_one(found: Found, way: str) -> None:
    one, two = found(way)
    assert max(off(one, two)) <= TOLERANCE
    for name, tensor in one.tensors.items():
        assert two.tensors[name].shape == tensor.shape, name


@pytest.mark.parametrize("way", MISTAKES)
def test_the_comparison_sees_gradients_that_are_put_together_wrongly(found: Found, way: str) -> None:
    assert max(off(*found(way))) > 10 * TOLERANCE


def test_a_batch_of_fewer_items_than_processes_counts_once() -> None:
    assert [Workers(rank, 3).share(["a", "b"]) for rank in range(3)] == [(["a"], 1.0), (["b"], 1.0), (["a"], 0.0)]


def test_regimes_that_change_whole_weights_are_refused_where_each_process_has_a_share(tiny_target: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_target, dtype=torch.float32)
    hooks = [layer_dropout.Hooks(layer_dropout.Params(), torch.Generator())]
    with pytest.raises(ValueError, match="layer_dropout changes whole ones"):
        training.train(model, [[1, 2, 3]], TrainingParams(), hooks, workers=Workers(0, 2, sharded=True))
