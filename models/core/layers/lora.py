"""Linear layers with a trained low-rank part beside them, W x + (α/r) B A x: `peft`'s, put into a model and taken out.

Letters: O outputs and I inputs of the layer, r rank. `peft` is imported where it is used, because that takes seconds.
"""

import warnings
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from models.core.layers.linears import linears, replace

ModuleT = TypeVar("ModuleT", bound=nn.Module)
_NAME = "default"  # of the one adapter, in peft's names


def insert_lora(
    model: PreTrainedModel,
    names: Sequence[str],
    rank: int,
    alpha: float,
    rng: torch.Generator,
    make_base: Callable[[nn.Linear], nn.Module] | None = None,
) -> None:
    """Put a low-rank part beside the layers of `names`, and `make_base(layer)` in place of every linear layer.

    Names are last parts of layers' names, such as "q_proj"; `rank` and `alpha` are r and α; `rng` draws the first
    factors; without `make_base`, whose layer computes W x, every layer stays as it is. ValueError if no layer has one
    of the names, or r is more than a layer's smaller side.
    """
    leaves = {name.rpartition(".")[2] for name, _ in linears(model)}
    if unknown := sorted(set(names) - leaves):
        raise ValueError(f"layers must be of {', '.join(sorted(leaves))}; got {', '.join(unknown)}")
    for name, layer in linears(model):
        if name.rpartition(".")[2] in names and rank > min(layer.weight.shape):
            raise ValueError(f"rank must be at most {min(layer.weight.shape)}, the smaller side of {name}; got {rank}")
    if make_base is not None:
        replace(model, lambda name, layer: make_base(layer))
    add_low_rank(model, names, rank, alpha, rng)


def add_low_rank(model: nn.Module, names: Sequence[str], rank: int, alpha: float, rng: torch.Generator) -> None:
    """Put `peft`'s low-rank part beside each module of `names`, in place; see `insert_lora`."""
    from peft import LoraConfig, inject_adapter_in_model
    from peft.tuners.lora import Linear

    scale: Any = alpha  # only ever divided by the rank
    config = LoraConfig(r=rank, lora_alpha=scale, target_modules=list(names))
    wrapped = {type(module) for name, module in model.named_modules() if name.rpartition(".")[2] in names}
    # A layer that keeps its weight in another form multiplies like any linear layer, which peft can't know.
    config._register_custom_module({kind: Linear for kind in wrapped if not issubclass(kind, nn.Linear)})
    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Unsupported layer type", UserWarning)
        torch.manual_seed(int(torch.randint(2**31, (1,), generator=rng)))
        inject_adapter_in_model(config, model, _NAME)


def take_out(model: nn.Module) -> None:
    """Add each product to its matrix in float64, round once, and put a plain linear layer in its place."""
    from peft.tuners.lora import Linear

    def plain(module: Any) -> nn.Linear:
        base, low, high = module.base_layer, module.lora_A[_NAME].weight, module.lora_B[_NAME].weight
        added = module.scaling[_NAME] * (high.detach().double() @ low.detach().double())
        return plain_linear((base.weight.double() + added).to(base.weight.dtype), base.bias)

    replace_kind(model, Linear, plain)
    if hasattr(model, "peft_config"):
        del model.peft_config


def replace_kind(model: nn.Module, kind: type[ModuleT], make: Callable[[ModuleT], nn.Module]) -> None:
    """Put `make(module)` in place of each module of a kind."""
    for name, module in list(model.named_modules()):
        if isinstance(module, kind):
            model.set_submodule(name, make(module))


def plain_linear(weight: Tensor, bias: nn.Parameter | None) -> nn.Linear:
    """Return a linear layer of `weight` [O, I]."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    layer.weight = nn.Parameter(weight.detach())
    if bias is not None:
        layer.bias = bias
    return layer
