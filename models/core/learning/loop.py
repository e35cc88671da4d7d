"""The one training loop: steps of AdamW over batches in the order that a seed gives, which a killed run goes on with.

A subclass says what a step computes, when the run is over, and what a checkpoint keeps besides weights and moments:
`training` for targets and proxies, `distill` for drafts.

Checkpoints, and the state of its end that another run goes on from, are safetensors: float32 weights, AdamW's moments
and its steps. A draft's own directory has only its weights, rounded to what the engine computes in.

Several processes may train one model, each on its share of every batch, as `torch.distributed` connects them. The loss
of a step is a sum over the whole batch divided by its rows or tokens, however many processes there are. Each divides
its own sum by the count of all and multiplies by the number of processes, because `DistributedDataParallel` and
`fully_shard` take the mean of the gradients. So several processes take the steps that one takes, but for rounding.
"""

import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

from models.core.checkpoints.readout import decoder_layers

ItemT = TypeVar("ItemT")
REPORT_S = 0.5
BatchT = TypeVar("BatchT")
_FILE = "checkpoint.safetensors"


class Workers:
    """The processes of a run, seen from one of them; one by itself by default.

    Attributes:
        rank: of this one, from 0. The first one writes and decides.
        size: how many there are.
        sharded: whether each keeps a share of the weights and moments (FSDP2) instead of all of them (DDP).
        on_saved: called in each of them after a checkpoint.
    """

    def __init__(
        self, rank: int = 0, size: int = 1, sharded: bool = False, on_saved: Callable[[], None] = lambda: None
    ) -> None:
        self.rank, self.size, self.sharded, self.on_saved = rank, size, sharded, on_saved

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def share(self, batch: Sequence[ItemT]) -> tuple[list[ItemT], float]:
        """Return this process's part of a batch, and 1; where none is left for it, one item that counts 0."""
        own = list(batch[self.rank :: self.size])
        return (own, 1.0) if own else (list(batch[:1]), 0.0)

    def sum(self, *values: float) -> list[float]:
        """Return the sums over all processes."""
        if self.size == 1:
            return list(values)
        sums = torch.tensor(values, dtype=torch.float64, device=_device())
        dist.all_reduce(sums)
        return sums.tolist()

    def agree(self, *values: float) -> list[float]:
        """Return the first process's values: what each measures by itself must not lead them apart."""
        if self.size == 1:
            return list(values)
        agreed = torch.tensor(values, dtype=torch.float64, device=_device())
        dist.broadcast(agreed, 0)
        return agreed.tolist()

    def shard(self, model: PreTrainedModel) -> None:
        """Give each process its share of a model's parameters, which change their class; before they are looked at."""
        if self.sharded:
            for block in decoder_layers(model):
                fully_shard(block)
            fully_shard(model)

    def joined(self, module: nn.Module) -> nn.Module:
        """Return what to call instead of a module, so that the gradients of its parameters are everybody's."""
        if self.size == 1 or self.sharded:
            return module
        # A draft's later steps run only for rows that were right so far, so that some parameters may have no gradient.
        return DistributedDataParallel(module, forward_sync_buffers=False, find_unused_parameters=True)

    @torch.no_grad()
    def whole(self, tensor: Tensor) -> Tensor:
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def shared_like(tensor: Tensor, parameter: Tensor) -> Tensor:
    """Return a whole tensor as this process keeps it of a parameter of that shape."""
    if not isinstance(parameter, DTensor):
        return tensor
    return distribute_tensor(tensor.to(parameter.device), parameter.device_mesh, parameter.placements)


def _device() -> str:
    return "cuda" if dist.get_backend() == "nccl" else "cpu"


ALONE = Workers()


class LoopParams(Protocol):
    """What the settings of every run have; see `models.params.TrainingParams`."""

    @property
    def learning_rate(self) -> float: ...
    @property
    def weight_decay(self) -> float: ...
    @property
    def max_grad_norm(self) -> float: ...
    @property
    def checkpoint_s(self) -> float: ...


class Loop(Generic[BatchT]):
    """A run.

    Attributes:
        trained: name to parameter.
        batches: of one epoch, in any order.
        total: steps of the whole run.
        key: what must be equal for a checkpoint to be this run's.
        lost: what becomes of a run whose loss is no number, in words.
        step, num_tokens: done so far.
        seconds: that took.
        losses: (step, running mean) of the steps that had a loss.
    """

    batches: Sequence[BatchT]
    total: int
    key: str
    lost: str

    def __init__(
        self,
        trained: Mapping[str, nn.Parameter],
        settings: LoopParams,
        seed: int,
        work_dir: Path | None,
        workers: Workers = ALONE,
    ) -> None:
        """Make the optimizer; a run without `work_dir` keeps no checkpoint."""
        self.trained, self.seed, self.work_dir, self.workers = trained, seed, work_dir, workers
        self.optimizer = torch.optim.AdamW(
            trained.values(), settings.learning_rate, (0.9, 0.95), weight_decay=settings.weight_decay, fused=True
        )
        self._settings = settings
        self.step = self.num_tokens = 0
        self.seconds = 0.0
        self.losses: list[tuple[int, float]] = []

    def advance(self, batch: BatchT) -> float | None:
        """Do a step and return its loss; None if it was left out."""
        raise NotImplementedError

    def is_over(self) -> bool:
        raise NotImplementedError

    def report(self) -> None:
        """Say how far the run is; called a few times a second at most."""
        raise NotImplementedError

    def before_step(self) -> None:
        """Do what must be done before a step and does not count as its time."""

    def after_step(self, batch: BatchT) -> None:
        """Do what follows a step, also one that was left out; `step` counts it already."""

    def looked(self) -> bool:
        """Look at what is trained if that is due, and save; return whether it was."""
        return False

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps beside the loop's own, as JSON."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take back what `state` returned."""

    def extra(self) -> Mapping[str, Tensor]:
        """Return the tensors that a checkpoint keeps besides weights and moments."""
        return {}

    def run_steps(self) -> None:
        """Do all steps that are left."""
        saved = shown = time.perf_counter()
        while not self.is_over():
            self.before_step()
            started = time.perf_counter()
            batch = batch_at(self.batches, self.step, self.seed)
            if (value := self.advance(batch)) is not None:
                mean = value if not self.losses else 0.95 * self.losses[-1][1] + 0.05 * value
                self.losses.append((self.step, mean))
            self.step += 1
            self.after_step(batch)
            now = time.perf_counter()
            seconds, is_due = self.workers.agree(now - started, now - saved > self._settings.checkpoint_s)
            self.seconds += seconds
            if now - shown > REPORT_S or self.step == self.total:
                shown = now
                self.report()
            if not self.looked() and self.losses and is_due:
                self.save()
                saved = time.perf_counter()

    def begin_step(self, rate: float) -> None:
        """Set the learning rate, and forget the gradients of the step before."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.zero_grad(set_to_none=True)

    def require_finite(self, loss: float) -> None:
        """Raise FloatingPointError if a loss is NaN or infinite; what is trained must be thrown away."""
        if not math.isfinite(loss):
            raise FloatingPointError(f"the loss is {loss} at step {self.step}; {self.lost}")

    def descend(self) -> None:
        """Clip the gradients and step."""
        torch.nn.utils.clip_grad_norm_(self.trained.values(), self._settings.max_grad_norm)
        self.optimizer.step()

    def save(self) -> None:
        """Write a checkpoint in place of the last one."""
        if self.work_dir is not None:
            own = {"step": self.step, "seconds": self.seconds, "num_tokens": self.num_tokens, "losses": self.losses}
            self.keep(self.work_dir, {**own, **self.state()})
            self.workers.on_saved()

    def resume(self) -> None:
        """Go on from the checkpoint of a run that was killed, if there is one of this run."""
        if self.work_dir is None:
            return
        self.work_dir.mkdir(parents=True, exist_ok=True)
        if (progress := self.take_back(self.work_dir)) is not None:
            self.step, self.seconds, self.num_tokens = (progress[name] for name in ("step", "seconds", "num_tokens"))
            self.losses = [(step, loss) for step, loss in progress["losses"]]
            self.restore(progress)

    def keep(self, folder: Path, progress: Mapping[str, Any]) -> None:
        """Write weights and moments, after at least one step, with `progress` as JSON, whole or not at all."""
        tensors = self._tensors() | {f"extra/{name}": tensor for name, tensor in self.extra().items()}
        if not self.workers.is_first:
            return
        file = folder / _FILE
        save_file(tensors, f"{file}.new", metadata={"progress": json.dumps({**progress, "key": self.key})})
        os.replace(f"{file}.new", file)

    def take_back(self, folder: Path) -> dict[str, Any] | None:
        """Put back what `keep` wrote, and return what was told; None if nothing is there, or only another run's."""
        file = folder / _FILE
        if not file.is_file():
            return None
        with safe_open(file, framework="pt") as handle:
            progress: dict[str, Any] = json.loads(handle.metadata()["progress"])
        if progress["key"] != self.key:
            return None
        tensors = load_file(file)
        self._restore(tensors)
        for name, tensor in self.extra().items():
            tensor.copy_(tensors[f"extra/{name}"])
        return progress

    def save_state(self, file: Path) -> None:
        """Write what another run goes on from."""
        tensors = self._tensors()
        if self.workers.is_first:
            save_file(tensors, file)

    def load_state(self, file: Path) -> None:
        """Put back what `save_state` wrote; ValueError names a parameter that is not of the same shape."""
        tensors = load_file(file)
        saved = {name.removeprefix("weight/"): tensor for name, tensor in tensors.items() if name.startswith("weight/")}
        for name in sorted(saved.keys() | self.trained.keys()):
            shapes = [None if name not in of else tuple(of[name].shape) for of in (saved, self.trained)]
            if shapes[0] != shapes[1]:
                raise ValueError(f"{file.name}: parameter {name} has shape {shapes[0]}, the draft has {shapes[1]}")
        self._restore(tensors)

    def _tensors(self) -> dict[str, Tensor]:
        whole = self.workers.whole
        tensors = {f"weight/{name}": whole(parameter.detach()).contiguous() for name, parameter in self.trained.items()}
        for name, parameter in self.trained.items():
            for key, value in self.optimizer.state[parameter].items():
                tensors[f"{key}/{name}"] = whole(value.detach()).reshape(-1 if key == "step" else value.shape)
        return tensors

    @torch.no_grad()
    def _restore(self, tensors: Mapping[str, Tensor]) -> None:
        for name, parameter in self.trained.items():
            parameter.copy_(shared_like(tensors[f"weight/{name}"], parameter))
            if f"step/{name}" not in tensors:  # no step has given it a gradient yet
                continue
            state = self.optimizer.state[parameter]
            for part in ("step", "exp_avg", "exp_avg_sq"):
                value = tensors[f"{part}/{name}"].reshape(() if part == "step" else parameter.shape)
                value = value if part == "step" else shared_like(value, parameter)
                if part in state:  # which lies where somebody wants it
                    state[part].copy_(value)
                else:
                    state[part] = value.to(parameter.device)


class Averaged:
    """The mean of a run's last weights, in place of a falling learning rate; others go on from the weights themselves.

    Attributes:
        tensors: name to mean, changed in place; empty where none is wanted.
        number: of steps that are in it.
    """

    def __init__(self, trained: Mapping[str, nn.Parameter], wanted: bool) -> None:
        self.tensors: dict[str, Tensor] = {name: torch.zeros_like(p) for name, p in trained.items()} if wanted else {}
        self.number = 0
        self._trained = trained

    def begin(self) -> None:
        """Forget the steps so far."""
        self.number = 0
        for tensor in self.tensors.values():
            tensor.zero_()

    @torch.no_grad()
    def add(self) -> None:
        """Take the weights as they are now into the mean."""
        self.number += 1
        for name, tensor in self.tensors.items():
            tensor += (self._trained[name] - tensor) / self.number

    def put(self) -> None:
        """Put the mean in the place of the weights, if there is one."""
        if self.number:
            self._set(self.tensors)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Have the mean in the place of the weights for as long as the context lasts."""
        own = {name: self._trained[name].detach().clone() for name in self.tensors}
        self.put()
        try:
            yield
        finally:
            self._set(own)

    @torch.no_grad()
    def _set(self, weights: Mapping[str, Tensor]) -> None:
        for name, tensor in weights.items():
            self._trained[name].copy_(tensor)


def batch_at(batches: Sequence[BatchT], step: int, seed: int) -> BatchT:
    """Return the batch of a step: each pass has an order of its own, which is the same in a run that was resumed."""
    epoch, place = divmod(step, len(batches))
    rng = torch.Generator().manual_seed(seed * 1000 + epoch)
    return batches[int(torch.randperm(len(batches), generator=rng)[place])]
