"""The laws that a pair of methods is held to, on a two-layer target: zeroes and frozen weights stay, logits are equal.

The fourth, that the saved shape loads again, is a call of `load_floats`.
"""

from collections.abc import Mapping

import torch
from torch import Tensor
from transformers import PreTrainedModel

from models.core.layers.linears import linears
from models.params import TrainingParams

DOCUMENTS = torch.randint(3, 259, (8, 32), generator=torch.Generator().manual_seed(0)).tolist()
# A step an epoch, and two, because no ticket is found before the second.
TRAINING = TrainingParams(num_epochs=2, batch_tokens=256, max_length=32, learning_rate=1e-2)


@torch.no_grad()
def logits(model: PreTrainedModel) -> Tensor:
    """Return what a model says after each token of a document, in evaluation mode whatever mode it is in."""
    training = model.training
    said = model.eval()(torch.tensor(DOCUMENTS[:1]), use_cache=False).logits
    model.train(training)
    return said


def zeroes(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return layer to where its weight is zero."""
    return {name: layer.weight == 0 for name, layer in linears(model)}


def require_zeroes(model: PreTrainedModel, before: Mapping[str, Tensor]) -> None:
    """Fail where a weight is not zero any more."""
    for name, layer in linears(model):
        filled = int((layer.weight[before[name]] != 0).sum())
        assert not filled, f"{filled} of {int(before[name].sum())} zeroes of {name} are filled"


def require_same(now: Mapping[str, Tensor], before: Mapping[str, Tensor]) -> None:
    """Fail where a tensor is not what it was."""
    moved = [name for name, tensor in before.items() if not torch.equal(now[name], tensor)]
    assert not moved, f"frozen weights moved: {', '.join(moved)}"


def require_close(said: Tensor, wanted: Tensor, share: float = 1e-5) -> None:
    """Fail where logits differ by more than a share of the largest."""
    assert torch.isfinite(said).all()
    assert float((said - wanted).abs().max()) <= share * float(wanted.abs().max())
