"""The one training loop: steps of AdamW over batches in the order that a seed gives, which a killed run goes on with.

A subclass says what a step computes, when the run is over, and what a checkpoint keeps besides weights and moments:
`training` for targets and proxies, `distill` for drafts.
"""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn

from models.core.learning.resume import load_progress, save_progress

REPORT_S = 0.5
BatchT = TypeVar("BatchT")


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
        self, trained: Mapping[str, nn.Parameter], settings: LoopParams, seed: int, work_dir: Path | None
    ) -> None:
        """Make the optimizer; a run without `work_dir` keeps no checkpoint."""
        self.trained, self.seed, self.work_dir = trained, seed, work_dir
        self.optimizer = torch.optim.AdamW(
            trained.values(),
            lr=settings.learning_rate,
            betas=(0.9, 0.95),
            weight_decay=settings.weight_decay,
            fused=True,
        )
        self._settings = settings
        self.step = self.num_tokens = 0
        self.seconds = 0.0
        self.losses: list[tuple[int, float]] = []

    def advance(self, batch: BatchT) -> float | None:
        """Do a step and return its loss; None if it was left out."""
        raise NotImplementedError

    def is_over(self) -> bool:
        """Whether the run has come to its end."""
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
            value = self.advance(batch)
            if value is not None:
                mean = value if not self.losses else 0.95 * self.losses[-1][1] + 0.05 * value
                self.losses.append((self.step, mean))
            self.step += 1
            self.after_step(batch)
            now = time.perf_counter()
            self.seconds += now - started
            if now - shown > REPORT_S or self.step == self.total:
                shown = now
                self.report()
            if not self.looked() and self.losses and now - saved > self._settings.checkpoint_s:
                self.save()
                saved = time.perf_counter()

    def begin_step(self, rate: float) -> None:
        """Set the learning rate, and forget the gradients of the step before."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.zero_grad(set_to_none=True)

    def require_finite(self, loss: Tensor) -> None:
        """Raise FloatingPointError if a loss is NaN or infinite; what is trained must be thrown away."""
        if not torch.isfinite(loss):
            raise FloatingPointError(f"the loss is {float(loss.detach())} at step {self.step}; {self.lost}")

    def descend(self) -> None:
        """Clip the gradients and step."""
        torch.nn.utils.clip_grad_norm_(self.trained.values(), self._settings.max_grad_norm)
        self.optimizer.step()

    def save(self) -> None:
        """Write a checkpoint in place of the last one."""
        if self.work_dir is not None:
            own = {"step": self.step, "seconds": self.seconds, "num_tokens": self.num_tokens, "losses": self.losses}
            progress = {**own, **self.state(), "key": self.key}
            save_progress(self.work_dir, self.trained, self.optimizer, progress, self.extra())

    def resume(self) -> None:
        """Go on from the checkpoint of a run that was killed, if there is one of this run."""
        if self.work_dir is None:
            return
        self.work_dir.mkdir(parents=True, exist_ok=True)
        progress = load_progress(self.work_dir, self.trained, self.optimizer, self.key, self.extra())
        if progress is not None:
            self.step, self.seconds, self.num_tokens = (progress[name] for name in ("step", "seconds", "num_tokens"))
            self.losses = [(step, loss) for step, loss in progress["losses"]]
            self.restore(progress)


def batch_at(batches: Sequence[BatchT], step: int, seed: int) -> BatchT:
    """Return the batch of a step: each pass has an order of its own, which is the same in a run that was resumed."""
    epoch, place = divmod(step, len(batches))
    rng = torch.Generator().manual_seed(seed * 1000 + epoch)
    return batches[int(torch.randperm(len(batches), generator=rng)[place])]
