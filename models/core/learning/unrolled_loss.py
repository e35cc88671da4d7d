"""What a batch of answers costs a draft: the loss over each row and, where that drafts on, over what it drafts then."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from models import catalog
from models.core.learning.batches import pack
from models.core.learning.hidden import HiddenStates, Sample
from models.core.learning.teacher import Teachers
from models.drafts import Draft, Procedure, Unrolled


class UnrolledLoss:
    """The loss of one run; see `models.core.learning.distill` for which rows go on."""

    def __init__(
        self,
        draft: Draft,
        procedure: Procedure,
        teachers: Teachers,
        counts: Mapping[str, Tensor],
        num_unroll: int,
        seed: int,
    ) -> None:
        """Take what a run is of.

        `counts` are sample id to [T] how much each token counts, empty where all count the same; `num_unroll` steps
        that a row is unrolled for, its first included; `seed` that of what the draft draws.
        """
        self._draft, self._procedure, self._teachers, self._counts = draft, procedure, teachers, counts
        self._num_unroll, self._seed = num_unroll, seed
        self._loss = catalog.load("losses", procedure.loss.name)

    def __call__(self, batch: Sequence[Sample], states: HiddenStates, step: int, done: float) -> tuple[Tensor, float]:
        """Return the loss to minimise, the mean over the draft and those nested in it, and its first unroll's mean.

        More rows go on as the draft gets better, so only the latter falls. Random choices are made by the optimizer's
        step: a resumed run draws what the unbroken one would. `done` is the share of the run, in [0, 1].
        """
        rows, final, log_sums, lengths = pack(batch, states, self._num_unroll, self._draft)
        rng = torch.Generator(final.device).manual_seed(self._seed * 1_000_003 + step)
        rows = rows._replace(rng=rng, done=done)
        last = lengths[rows.sequence] - 1

        def came(step: int, running: Tensor) -> Tensor:
            return rows.token_ids[rows.sequence[running], rows.index[running] + 2 + step]

        def keep(step: int, running: Tensor, logits: Tensor) -> Tensor:
            going = rows.index[running] + 3 + step <= last[running]
            if self._procedure.follow == "accepted":
                going &= self._choice(logits) == came(step, running)
            return going

        counts, word = self._padded_counts(batch, final.device), self._teachers.say(batch, (final, log_sums))

        def of(unrolls: Sequence[Unrolled]) -> tuple[Tensor, float]:
            total, first = torch.zeros((), device=final.device), 0.0
            for step, unrolled in enumerate(unrolls):
                running = unrolled.running
                if len(running) == 0:
                    break
                sequence, position = rows.sequence[running], rows.index[running] + 1 + step
                places = sequence, position
                drafted = self._teachers.drafted(unrolled, came(step, running), word, places)
                values = self._loss.loss(drafted, self._procedure.loss)
                if unrolled.added is not None:
                    values = values + unrolled.added
                counted = values if counts is None else values * counts[sequence, position + 1]
                total = total + self._procedure.step_decay**step * counted.sum()
                if step == 0:
                    first = float(values.detach().mean())
            return total / len(rows.index), first

        parts = [of(unrolls) for unrolls in self._draft.unroll_all(rows, self._num_unroll, keep)]
        return torch.stack([loss for loss, _ in parts]).mean(), parts[0][1]

    def _padded_counts(self, batch: Sequence[Sample], device: torch.device) -> Tensor | None:
        """Return [B, T] what each token counts, None where all count the same."""
        if not self._counts:
            return None
        of_batch = [self._counts[sample.id] for sample in batch]
        return torch.nn.utils.rnn.pad_sequence(of_batch, batch_first=True).to(device)

    def _choice(self, logits: Tensor) -> Tensor:
        """[n, D] → [n] the target ids that the draft would have proposed."""
        return self._draft.vocabulary[logits.argmax(-1)]
