"""A linear layer with a trained low-rank part beside it: W x + (α/r) B A x.

Letters: O outputs and I inputs of the layer, r rank.
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from models.layers.linears import linears, replace

ModuleT = TypeVar("ModuleT", bound=nn.Module)


class LoraLinear(nn.Module):
    """`base` with the product of `lora_b` [O, r] and `lora_a` [r, I] added; only these two are trained."""

    def __init__(self, base: nn.Module, weight: Tensor, rank: int, alpha: float, rng: torch.Generator) -> None:
        super().__init__()
        num_outputs, num_inputs = weight.shape
        self.in_features, self.out_features = num_inputs, num_outputs
        self.base, self.scale = base, alpha / rank
        bound = num_inputs**-0.5
        drawn = (2 * torch.rand(rank, num_inputs, generator=rng) - 1) * bound
        self.lora_a = nn.Parameter(drawn.to(weight))
        self.lora_b = nn.Parameter(torch.zeros(num_outputs, rank).to(weight))

    def forward(self, inputs: Tensor) -> Tensor:
        """[..., I] → [..., O], through the r numbers in between: O·I products are never formed."""
        low: Tensor = nn.functional.linear(nn.functional.linear(inputs, self.lora_a), self.lora_b)
        base: Tensor = self.base(inputs)
        return base + self.scale * low


def insert_lora(
    model: PreTrainedModel,
    names: Sequence[str],
    rank: int,
    alpha: float,
    rng: torch.Generator,
    make_base: Callable[[nn.Linear], nn.Module],
) -> None:
    """Put a low-rank part beside the layers of `names`, and `make_base(layer)` in place of every linear layer.

    Args:
        model: of Llama's layout; changed in place.
        names: last parts of layers' names, such as "q_proj".
        rank: r.
        alpha: α.
        rng: draws the first factors.
        make_base: returns the layer that computes W x.

    Raises:
        ValueError: no layer has one of the names, or r is more than a layer's smaller side.
    """
    leaves = {name.rpartition(".")[2] for name, _ in linears(model)}
    if unknown := sorted(set(names) - leaves):
        raise ValueError(f"layers must be of {', '.join(sorted(leaves))}; got {', '.join(unknown)}")
    for name, layer in linears(model):
        if name.rpartition(".")[2] in names and rank > min(layer.weight.shape):
            raise ValueError(f"rank must be at most {min(layer.weight.shape)}, the smaller side of {name}; got {rank}")

    def make(name: str, layer: nn.Linear) -> nn.Module:
        if name.rpartition(".")[2] not in names:
            return make_base(layer)
        return LoraLinear(make_base(layer), layer.weight, rank, alpha, rng)

    replace(model, make)


def replace_kind(model: PreTrainedModel, kind: type[ModuleT], make: Callable[[ModuleT], nn.Module]) -> None:
    """Put `make(module)` in place of each module of a kind."""
    for name, module in list(model.named_modules()):
        if isinstance(module, kind):
            parent, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(parent), leaf, make(module))


@torch.no_grad()
def plain_linear(weight: Tensor, bias: Tensor | None, added: LoraLinear | None) -> nn.Linear:
    """Return a linear layer of `weight` [O, I] with a low-rank part added to it in float64 and rounded once."""
    if added is not None:
        product = added.scale * (added.lora_b.double() @ added.lora_a.double())
        weight = (weight.double() + product).to(weight.dtype)
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    layer.weight = nn.Parameter(weight)
    layer.bias = bias
    return layer
