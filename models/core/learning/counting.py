"""What training costs: floating-point operations, memory held for the backward pass, and bytes of weights.

FLOPs are those of matrix products and attention, two for a multiplication and its addition, by the formulas of
`torch.utils.flop_counter` (its own counter follows modules as well, which slows a small model by half; this one by a
tenth). Attention is counted whole, without the half that a causal mask could save; the CPU's kernel is added, which
PyTorch's table leaves out. What is simulated is counted as what runs: a product of 4-bit numbers in float32 is a
float32 product.

Held memory is what autograd saves between forward and backward pass, each storage once and parameters left out, since
several operations save the same tensor. It is the part of a step's memory that grows with the batch; temporary results,
gradients and optimizer state come on top.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry


def _attention(query: Tensor, key: Tensor, value: Tensor, *args: object, **settings: object) -> int:
    """Two products of [B, heads, T, D]: scores, and values weighted by them."""
    return 2 * query.shape[:-1].numel() * key.shape[2] * (query.shape[3] + value.shape[3])


def _attention_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *args: object, **settings: object
) -> int:
    """Five products: the scores once more, and the gradients of weights, values, queries and keys."""
    return 2 * query.shape[:-1].numel() * key.shape[2] * (3 * query.shape[3] + 2 * value.shape[3])


_FORMULAS: Mapping[Any, Callable[..., int]] = {
    **flop_registry,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}


class Cost(TorchDispatchMode):
    """What was done so far inside of `counted`.

    Attributes:
        flops: floating-point operations.
        peak_activation_bytes: most that was held for the backward pass at one time.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own, without types
        self.flops = self.peak_activation_bytes = self._held_bytes = 0
        self._own = {tensor.untyped_storage()._cdata for tensor in [*model.parameters(), *model.buffers()]}
        self._holders: Counter[int] = Counter()  # of each storage

    def __torch_dispatch__(
        self, operation: Any, types: object, args: tuple[Any, ...] = (), settings: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation and add what it costs."""
        output = operation(*args, **(settings or {}))
        if formula := _FORMULAS.get(operation._overloadpacket):
            self.flops += formula(*args, **(settings or {}), out_val=output)
        return output

    def pack(self, tensor: Tensor) -> "_Saved":
        """Count what autograd saves until it lets it go."""
        storage = tensor.untyped_storage()
        saved, key, size = _Saved(tensor), storage._cdata, storage.nbytes()
        if key not in self._own:
            self._held_bytes += 0 if self._holders[key] else size
            self._holders[key] += 1
            self.peak_activation_bytes = max(self.peak_activation_bytes, self._held_bytes)
            weakref.finalize(saved, self._release, key, size).atexit = False
        return saved

    def _release(self, key: int, size: int) -> None:
        self._holders[key] -= 1
        if not self._holders[key]:
            del self._holders[key]
            self._held_bytes -= size


@contextmanager
def counted(model: nn.Module) -> Iterator[Cost]:
    """Count what is done inside; parameters and buffers of `model` don't count as held, but those made inside do."""
    cost = Cost(model)
    with cost, torch.autograd.graph.saved_tensors_hooks(cost.pack, lambda saved: saved.tensor):
        yield cost


def held_bytes(model: nn.Module, forward: Callable[[], object]) -> int:
    """Return the most bytes that `forward` holds for the backward pass besides the model itself."""
    with counted(model) as cost:
        forward()
    return cost.peak_activation_bytes


class _Saved:
    """A tensor that autograd holds; it goes when the graph lets it go. With a graph of its own it would hold itself."""

    __slots__ = ("__weakref__", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.detach()
