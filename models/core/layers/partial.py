"""A decoder block that is run for some rows of a batch; the others pass by on the residual stream."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from models.core.layers.linears import blocks

# Block number and its input [B, T, H] to a weight a row [B], 0 or 1; a gradient that it carries is that of the block's
# share in its output.
Choose = Callable[[int, Tensor], Tensor]


class PartialBlock(nn.Module):
    """Runs `block` for the rows that `choose` picks; in evaluation for all, as dropout does."""

    def __init__(self, block: nn.Module, index: int, choose: Choose) -> None:
        super().__init__()
        self.block, self.index, self.choose = block, index, choose

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:  # other code goes on to find the block's own parts
            return getattr(super().__getattr__("block"), name)

    def forward(self, hidden: Tensor, **settings: object) -> Tensor:
        """Return [B, T, H]; see `models.core.layers.partial`."""
        if not self.training:
            whole: Tensor = self.block(hidden, **settings)
            return whole
        share = self.choose(self.index, hidden)
        rows = share.detach().nonzero()[:, 0]
        if not len(rows):
            return hidden
        if len(rows) == len(hidden):
            output: Tensor = self.block(hidden, **settings)
        else:
            chosen = {name: _pick(value, rows, len(hidden)) for name, value in settings.items()}
            output = hidden.index_copy(0, rows, self.block(hidden[rows], **chosen))
        return hidden + share[:, None, None] * (output - hidden) if share.requires_grad else output


def make_partial(model: PreTrainedModel, choose: Choose) -> None:
    """Put a `PartialBlock` around each block; ValueError if the model is not of Llama's layout."""
    for index, block in enumerate(blocks(model)):
        model.set_submodule(f"model.layers.{index}", PartialBlock(block, index, choose))


def make_whole(model: PreTrainedModel) -> None:
    """Take back what `make_partial` did."""
    for index, block in enumerate(blocks(model)):
        model.set_submodule(f"model.layers.{index}", block.get_submodule("block"))


def _pick(value: object, rows: Tensor, batch_size: int) -> object:
    """Take rows of masks [B, 1, T, T], positions [B, T] and rotations; what has a first axis of 1 is shared."""
    if isinstance(value, tuple):
        return tuple(_pick(part, rows, batch_size) for part in value)
    if isinstance(value, Tensor) and value.ndim and value.shape[0] == batch_size:
        return value[rows]
    return value
