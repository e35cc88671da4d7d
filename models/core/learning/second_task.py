"""A second task that a language model learns beside the first, such as giving the rationale of an answer.

L = L_first + λ L_second, each of them a mean over the tokens of a batch

In "distilling step-by-step" the second task is to say why an answer is what it is. It teaches what the first one's text
alone does not, and only the first is asked for later, so that answers cost no more. Each step of the first goes with a
batch of the second, as large, in an order of its own.
"""

from collections.abc import Sequence

from torch import Tensor
from transformers import PreTrainedModel

from models.core.learning.hidden import batches_of
from models.core.learning.loop import batch_at
from models.core.learning.training import cut, pad
from models.params import TrainingParams
from models.regimes import Batch, Regime

PAPER = "arXiv:2305.02301, section 3.2"


class SecondTask(Regime):
    """The hook that adds it to the loss of the one loop."""

    KEPT = ("loss",)

    def __init__(self, documents: Sequence[Sequence[int]], weight: float, params: TrainingParams, seed: int) -> None:
        """Group documents, token ids, in batches as the loop's; `weight` is λ; ValueError if none has two tokens."""
        self._batches = batches_of(cut(documents, params.max_length), len, params.batch_tokens)
        self._weight, self._seed, self._step = weight, seed, 0
        self.loss: float | None = None

    def batch_at(self, step: int) -> list[list[int]]:
        """Return the documents that go with a step, the same ones in a run that was resumed."""
        return batch_at(self._batches, step, self._seed)

    def runs(self, step: int) -> bool:
        """See the base; every step runs."""
        self._step = step
        return True

    def penalty(self, model: PreTrainedModel, batch: Batch) -> Tensor | None:
        if self._weight == 0:
            return None
        own, device = pad(self.batch_at(self._step)), batch.token_ids.device
        loss: Tensor = model(input_ids=own.token_ids.to(device), labels=own.labels.to(device), use_cache=False).loss
        value = float(loss.detach())
        self.loss = value if self.loss is None else 0.95 * self.loss + 0.05 * value
        return self._weight * loss

    def figures(self) -> dict[str, float]:
        """See the base: the running mean of the second task's own loss, in nats a token."""
        return {} if self.loss is None else {"second_task_loss": self.loss}
