"""What training costs: floating-point operations, memory held for the backward pass, and bytes of weights.

FLOPs are those of matrix products and attention, two for a multiplication and its addition, as
`torch.utils.flop_counter` counts them; attention is counted whole, without the half that a causal mask could save. The
CPU's attention kernel is added, which PyTorch's table leaves out. What is simulated is counted as what runs: a product
of 4-bit numbers in float32 is a float32 product.

Held memory is what autograd saves between forward and backward pass, each storage once and parameters left out, since
several operations save the same tensor. It is the part of a step's memory that grows with the batch; temporary results,
gradients and optimizer state come on top.
"""

import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import PreTrainedModel


def _attention(
    query: Sequence[int], key: Sequence[int], value: Sequence[int], *args: object, **settings: object
) -> int:
    """Two products of shapes [B, heads, T, S, D]: scores, and values weighted by them."""
    batch, heads, length, width = query
    return 2 * batch * heads * length * key[2] * (width + value[3])


def _attention_backward(
    grad: Sequence[int],
    query: Sequence[int],
    key: Sequence[int],
    value: Sequence[int],
    *args: object,
    **settings: object,
) -> int:
    """Five products: the scores once more, and the gradients of weights, values, queries and keys."""
    batch, heads, length, width = query
    return 2 * batch * heads * length * key[2] * (3 * width + 2 * value[3])


_CPU_ATTENTION = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}


class Cost:
    """What was done so far inside of `counted`."""

    def __init__(self, model: nn.Module) -> None:
        self._counter = FlopCounterMode(display=False, custom_mapping=_CPU_ATTENTION)
        self._held = _Held(model)

    @property
    def flops(self) -> int:
        """Floating-point operations."""
        return self._counter.get_total_flops()

    @property
    def peak_activation_bytes(self) -> int:
        """Most that was held for the backward pass at one time."""
        return self._held.peak


class StepCost(NamedTuple):
    """What one training step of a batch costs, without the optimizer's own arithmetic.

    Attributes:
        forward_flops: of the forward pass.
        backward_flops: of the backward pass.
        peak_activation_bytes: held for the backward pass.
    """

    forward_flops: int
    backward_flops: int
    peak_activation_bytes: int


@contextmanager
def counted(model: nn.Module) -> Iterator[Cost]:
    """Count what is done inside, by any number of steps.

    Args:
        model: whose parameters don't count as held; those that are made inside do.
    """
    cost = Cost(model)
    with cost._counter, torch.autograd.graph.saved_tensors_hooks(cost._held.pack, _unpack):
        yield cost


def step_cost(model: PreTrainedModel, batch_size: int, length: int) -> StepCost:
    """Run one forward and backward pass of next-token loss and return its cost; weights and gradients stay.

    Args:
        model: any causal language model.
        batch_size: documents, B.
        length: tokens of each, T.

    Raises:
        ValueError: a batch without a token to predict.
    """
    if batch_size < 1 or length < 2:
        raise ValueError(f"batch_size must be at least 1 and length 2; got {batch_size} and {length}")
    token_ids = torch.zeros(batch_size, length, dtype=torch.int64, device=model.device)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    with counted(model) as cost:
        loss = model(input_ids=token_ids, labels=token_ids, use_cache=False).loss
        forward_flops = cost.flops
        torch.autograd.grad(loss, trained, allow_unused=True)
    return StepCost(forward_flops, cost.flops - forward_flops, cost.peak_activation_bytes)


def parameter_bytes(model: nn.Module) -> int:
    """Return the bytes of a model's parameters, a shared one once."""
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())


def checkpoint_bytes(directory: Path) -> int:
    """Return the bytes of a checkpoint's weights on disk.

    Raises:
        ValueError: the directory holds no safetensors file.
    """
    files = list(directory.glob("*.safetensors"))
    if not files:
        raise ValueError(f"{directory.name} holds no .safetensors file")
    return sum(file.stat().st_size for file in files)


class _Saved:
    """A tensor that autograd holds; it goes when the graph lets it go."""

    __slots__ = ("__weakref__", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class _Held:
    def __init__(self, model: nn.Module) -> None:
        self.parameters = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
        self.holders: Counter[int] = Counter()
        self.now = self.peak = 0

    def pack(self, tensor: Tensor) -> _Saved:
        storage = tensor.untyped_storage()
        saved, key, size = _Saved(tensor), storage._cdata, storage.nbytes()
        if key not in self.parameters:
            self.now += 0 if self.holders[key] else size
            self.holders[key] += 1
            self.peak = max(self.peak, self.now)
            weakref.finalize(saved, self._release, key, size).atexit = False
        return saved

    def _release(self, key: int, size: int) -> None:
        self.holders[key] -= 1
        if not self.holders[key]:
            del self.holders[key]
            self.now -= size


def _unpack(saved: _Saved) -> Tensor:
    return saved.tensor
