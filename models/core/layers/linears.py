"""Decoder blocks of Llama's layout, the one walk over their linear layers, and calibration inputs caught on the way.

transformers makes the real parts, for each architecture of classes of its own, and what an `nn.Module` holds has no
type unless a class says so. None of those here is ever made: `blocks` promises them to type checkers.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import TypeVar, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

# Tokens for each input of the widest layer below which methods that solve for weights fit the sample instead.
ENOUGH = 4
_SPARED = "spared"


class Norm(nn.Module):
    weight: nn.Parameter


class Attention(nn.Module):
    config: PreTrainedConfig
    head_dim: int
    q_proj: nn.Linear
    k_proj: nn.Linear
    v_proj: nn.Linear
    o_proj: nn.Linear


class Mlp(nn.Module):
    gate_proj: nn.Linear
    up_proj: nn.Linear
    down_proj: nn.Linear


class Block(nn.Module):
    input_layernorm: Norm
    self_attn: Attention
    post_attention_layernorm: Norm
    mlp: Mlp


def blocks(model: PreTrainedModel) -> Sequence[Block]:
    """Return the decoder blocks; ValueError if the model is not of Llama's layout."""
    layers = getattr(getattr(model, "model", None), "layers", None)
    if not isinstance(layers, nn.ModuleList):
        raise ValueError(f"{type(model).__name__} has no model.layers; models of Llama's layout are handled")
    return cast("Sequence[Block]", layers)


def linears(model: PreTrainedModel) -> Iterator[tuple[str, nn.Linear]]:
    """Yield the linear layers of the decoder blocks by name, in the order of the forward pass, but those of `sparing`.

    Embedding and output matrix are left out: they are often one matrix, and methods of this kind spare them. ValueError
    if a block multiplies by a weight matrix that is no `nn.Linear`, such as a fused or quantized layer; names it.
    """
    for index, block in enumerate(blocks(model)):
        for name, module in block.named_modules():
            where = f"model.layers.{index}.{name}"
            if getattr(module, _SPARED, False):
                continue
            if isinstance(module, nn.Linear):
                yield where, module
            elif any(parameter.ndim > 1 for parameter in module.parameters(recurse=False)):
                raise ValueError(f"layer {where} is a {type(module).__name__}; this method handles nn.Linear")


@contextmanager
def sparing(model: PreTrainedModel, names: Collection[str]) -> Iterator[None]:
    """Let `linears` pass over some layers for a while, so that no method touches them."""
    spared = [layer for name, layer in linears(model) if name in names]
    for layer in spared:
        setattr(layer, _SPARED, True)
    try:
        yield
    finally:
        for layer in spared:
            delattr(layer, _SPARED)


def replace(model: PreTrainedModel, make: Callable[[str, nn.Linear], nn.Module]) -> None:
    """Put `make(name, layer)` in place of each linear layer of the decoder blocks."""
    for name, layer in list(linears(model)):
        model.set_submodule(name, make(name, layer))


def enough_tokens(model: PreTrainedModel) -> int:
    """Return how many tokens to calibrate on: XᵀX of fewer than some times the widest input is nearly singular."""
    return ENOUGH * max(layer.in_features for _, layer in linears(model))


class Rows:
    """All that layers read, kept as it is."""

    def __init__(self) -> None:
        self._found: list[Tensor] = []

    def add(self, rows: Tensor) -> None:
        """Take [n, I]."""
        self._found.append(rows)

    @property
    def inputs(self) -> Tensor:
        """[N, I], one row a token."""
        return torch.cat(self._found)


class Gram:
    """XᵀX of what layers read, which grows with their width and not with the text.

    Attributes:
        matrix: [I, I] float32.
        num_tokens: N.
    """

    def __init__(self, inputs: Tensor | None = None) -> None:
        """Begin with nothing, or with inputs [n, I]."""
        self.matrix: Tensor
        self.num_tokens = 0
        if inputs is not None:
            self.add(inputs)

    def add(self, rows: Tensor) -> None:
        """Take [n, I]."""
        product = rows.float().T @ rows.float()
        self.matrix = product if self.num_tokens == 0 else self.matrix.add_(product)
        self.num_tokens += len(rows)


CollectedT = TypeVar("CollectedT", Rows, Gram)


@torch.no_grad()
def calibrate(
    model: PreTrainedModel,
    documents: Sequence[Sequence[int]],
    collect: type[CollectedT],
    visit: Callable[[str, nn.Linear, CollectedT], None],
) -> None:
    """Call `visit(name, layer, collected)` for each linear layer with what it reads when the model reads `documents`.

    Block by block: all layers of a block are visited with the inputs that came through the blocks before it as `visit`
    has left them, and the block is run again before the next one. Layers that read the same share one object. `visit`
    may change weights in place, and leaves what was collected as it is: `collect`, of inputs [N, I]. ValueError if
    there are no documents, or a layer can't be handled.
    """
    if not documents or min(map(len, documents)) < 1:
        raise ValueError(f"calibration takes documents of at least one token; got {len(documents)}")
    kinds = sorted(set(getattr(model.config, "layer_types", None) or ()))
    if len(kinds) > 1:  # the first block's mask would serve them all
        raise ValueError(f"calibration handles blocks that attend in one way; this model's are {', '.join(kinds)}")
    by_block: dict[int, list[tuple[str, nn.Linear]]] = defaultdict(list)
    for name, layer in linears(model):
        by_block[int(name.split(".")[2])].append((name, layer))
    calls = [_first_call(model, document) for document in documents]
    for index, block in enumerate(blocks(model)):
        collected: dict[str, CollectedT] = {}
        for states, settings in calls:
            for names, inputs in _read(block, by_block[index], states, settings):
                shared = collected.get(names[0]) or collect()
                shared.add(inputs)
                collected |= dict.fromkeys(names, shared)
        for name, layer in by_block[index]:
            visit(name, layer, collected[name])
        passed = [block(states, **settings) for states, settings in calls]
        calls = [
            (output if isinstance(output, Tensor) else output[0], settings)
            for output, (_, settings) in zip(passed, calls, strict=True)
        ]


def _read(
    block: Block, layers: Sequence[tuple[str, nn.Linear]], states: Tensor, settings: dict[str, object]
) -> list[tuple[list[str], Tensor]]:
    """Run a block; return what its layers read, [n, I] each, and the names of those that read it."""
    found: list[tuple[list[str], Tensor]] = []

    def catch(name: str, inputs: Tensor) -> None:
        if found and found[-1][1] is inputs:
            found[-1][0].append(name)
        else:
            found.append(([name], inputs))

    with ExitStack() as hooks:
        for name, layer in layers:
            hooks.enter_context(layer.register_forward_pre_hook(lambda module, args, name=name: catch(name, args[0])))
        block(states, **settings)
    return [(names, inputs.flatten(0, -2)) for names, inputs in found]


class _Caught(Exception):
    pass


def _first_call(model: PreTrainedModel, document: Sequence[int]) -> tuple[Tensor, dict[str, object]]:
    """Return what the first block is called with, one document at a time, so that nothing is padding."""
    found: list[tuple[Tensor, dict[str, object]]] = []

    def catch(module: nn.Module, args: tuple[Tensor, ...], settings: dict[str, object]) -> None:
        found.append((args[0], settings))
        raise _Caught

    with blocks(model)[0].register_forward_pre_hook(catch, with_kwargs=True), suppress(_Caught):
        model(input_ids=torch.tensor([list(document)], device=model.device), use_cache=False)
    return found[0]


def inverse_factor(hessian: Tensor, dampening: float) -> Tensor:
    """Return the upper Cholesky factor of the inverse Hessian of a layer's squared error (arXiv:2210.17323, section 3).

    `hessian` [I, I] is Xᵀ X of the inputs X [N, I] or a multiple of it, to whose diagonal a share of its mean is added.
    Of U [I, I] an error in feature i is made up for in later features by its row i, over U[i, i].
    """
    diagonal = hessian.diagonal()
    mean = diagonal.mean()
    # A feature that was never seen has a row of zeros: any positive number leaves it by itself.
    hessian = hessian + torch.diag(torch.where(diagonal > 0, dampening * mean, mean.clamp(min=1e-6)))
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(hessian))
    factor: Tensor = torch.linalg.cholesky(inverse, upper=True)
    return factor
