"""Several processes that train one model, each on its share of every batch, as `torch.distributed` connects them.

The loss of a step is a sum over the whole batch divided by its rows or tokens, however many processes there are. Each
divides its own sum by the count of all and multiplies by the number of processes, because `DistributedDataParallel` and
`fully_shard` take the mean of the gradients. So several processes take the steps that one takes, but for rounding.
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

from models.core.checkpoints.readout import decoder_layers

ItemT = TypeVar("ItemT")


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
