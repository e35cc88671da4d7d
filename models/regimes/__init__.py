"""Training regimes: what a method changes about the one training loop (`models.core.learning.training`), as hooks.

Letters: B documents of a batch, T tokens of a document, L layers of the model.

A method's module has

- `CHANGES`: which parts of training it changes, of `models.together.PARTS`; two methods that change the same part
  can't be combined. What else it changes, and `KEEPS`, is in `models.together`;
- `Hooks(params, rng)`, a `Regime`: what it refuses of a model is a ValueError when training starts; or, where the
  algorithm is another loop,
- `train(model, documents, params, training, seed, work_dir, on_progress) -> models.core.learning.training.Trained`:
  that loop, which runs the one loop inside of it where it can. Such a method changes part "loop", and combines with no
  other;
- `COMPARED`, optional: `Params` of the rows that its family's table shows beside the defaults, by heading.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel


class Batch(NamedTuple):
    """What one step trains on, [B, T] int64 each."""

    token_ids: Tensor  # padded with anything
    labels: Tensor  # the same ids, −100 where there is nothing to learn; the model shifts them by itself
    position_ids: Tensor | None = None  # where rows hold several documents, each counted from 0; None counts rows

    @property
    def num_tokens(self) -> int:
        return int((self.labels != -100).sum())


class Regime:
    """One method's hooks. What is not overridden changes nothing.

    A regime may wrap or replace modules in `start` and takes all of it back in `finish`, so that a plain Hugging Face
    model comes out.
    """

    handles: Sequence[RemovableHandle] = ()  # of what `start` hung on the model
    KEPT: tuple[str, ...] = ()  # attributes that a resumed run needs, of values that JSON has

    def __init__(self, params: Any = None, rng: Any = None) -> None:
        self.params, self.rng = params, rng

    def start(self, model: PreTrainedModel, num_steps: int) -> list[nn.Parameter] | None:
        """Prepare the model before the optimizer is made; returns parameters of its own that are trained too."""

    def hold(self, optimizer: Optimizer) -> None:
        """Say where the optimizer's state lies, before it has any."""

    def batches(self, pieces: list[list[int]], batch_tokens: int) -> list[list[list[int]]] | None:
        """Group documents into batches, or None to leave it to the loop, which puts those of like length together."""
        return None

    def collate(self, documents: list[list[int]]) -> Batch | None:
        """Make a batch of documents, or None to leave it to the loop, which pads."""
        return None

    def runs(self, step: int) -> bool:
        """Whether this step is done at all."""
        return True

    def around(self, step: int) -> AbstractContextManager[object]:
        """Return the context that forward and backward pass run in."""
        return nullcontext()

    def answering(self, model: PreTrainedModel) -> AbstractContextManager[object]:
        """Return the context in which the finished model computes as it would in use, if that is not as a plain one."""
        return nullcontext()

    def penalty(self, model: PreTrainedModel, batch: Batch) -> Tensor | None:
        """Return what is added to the loss after the forward pass, a scalar."""
        return None

    def after_backward(self, model: PreTrainedModel) -> None:
        """Change gradients before they are clipped."""

    def after_step(self, model: PreTrainedModel) -> None:
        """Change weights after the optimizer did."""

    def after_epoch(self, model: PreTrainedModel, epoch: int) -> bool:
        """Look at the model after epoch `epoch`, counted from 0; True ends training."""
        return False

    def finish(self, model: PreTrainedModel) -> None:
        for handle in self.handles:
            handle.remove()

    def figures(self) -> dict[str, float]:
        """Return what it did, such as the share of skipped layers. `flops_share` scales the count of FLOPs where
        savings are simulated: what is really left out is not counted."""
        return {}

    def state(self) -> dict[str, Any]:
        """Return what a resumed run needs besides the weights, as JSON."""
        return {name: getattr(self, name) for name in self.KEPT}

    def restore(self, state: dict[str, Any]) -> None:
        for name in self.KEPT:
            setattr(self, name, state[name])


class Skipping(Regime):
    """Hooks that leave out blocks row by row, by `coins` that a resumed run tosses again."""

    KEPT = ("num_skipped", "num_seen")

    def __init__(self, params: Any, rng: torch.Generator) -> None:
        super().__init__(params, rng)
        self.seed, self.coins = int(torch.randint(2**31, (1,), generator=rng)), torch.Generator()
        self.num_skipped = self.num_seen = 0

    def around(self, step: int) -> AbstractContextManager[object]:
        self.step = step
        self.coins.manual_seed(self.seed + step)
        return nullcontext()

    def count(self, ran: Tensor) -> None:
        """Count [B] rows, of which some ran."""
        self.num_seen += len(ran)
        self.num_skipped += len(ran) - int(ran.sum())

    def figures(self) -> dict[str, float]:
        return {"skipped_layer_share": self.num_skipped / max(self.num_seen, 1)}
