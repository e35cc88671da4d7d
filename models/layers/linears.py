"""The one walk over a model's linear layers, and calibration inputs caught on the way."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from models.layers.layout import Block
from models.training import pad


def linears(model: PreTrainedModel) -> Iterator[tuple[str, nn.Linear]]:
    """Yield the linear layers of the decoder blocks by name, in the order of the forward pass.

    Embedding and output matrix are left out: they are often one matrix, and methods of this kind spare them.

    Raises:
        ValueError: a block multiplies by a weight matrix that is no `nn.Linear`, such as a fused or quantized layer;
            names it.
    """
    for index, block in enumerate(blocks(model)):
        for name, module in block.named_modules():
            where = f"model.layers.{index}.{name}"
            if isinstance(module, nn.Linear):
                yield where, module
            elif any(parameter.ndim > 1 for parameter in module.parameters(recurse=False)):
                raise ValueError(f"layer {where} is a {type(module).__name__}; this method handles nn.Linear")


def blocks(model: PreTrainedModel) -> Sequence[Block]:
    """Return the decoder blocks.

    Raises:
        ValueError: the model is not of Llama's layout.
    """
    layers = getattr(getattr(model, "model", None), "layers", None)
    if not isinstance(layers, nn.ModuleList):
        raise ValueError(f"{type(model).__name__} has no model.layers; models of Llama's layout are handled")
    return cast("Sequence[Block]", layers)


def replace(model: PreTrainedModel, make: Callable[[str, nn.Linear], nn.Module]) -> None:
    """Put `make(name, layer)` in place of each linear layer of the decoder blocks."""
    for name, layer in list(linears(model)):
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, make(name, layer))


@torch.no_grad()
def calibrate(
    model: PreTrainedModel,
    documents: Sequence[Sequence[int]],
    visit: Callable[[str, nn.Linear, Tensor], None],
) -> None:
    """Call `visit(name, layer, inputs)` for each linear layer with what it reads when the model reads `documents`.

    Block by block: all layers of a block are visited with the inputs that came through the blocks before it as
    `visit` has left them, and the block is run again before the next one.

    Args:
        model: of Llama's layout; `visit` may change weights in place.
        documents: token ids.
        visit: inputs are [N, I], one row a token, padding left out.

    Raises:
        ValueError: there are no documents, or a layer can't be handled.
    """
    if not documents or min(map(len, documents)) < 1:
        raise ValueError(f"calibration takes documents of at least one token; got {len(documents)}")
    kinds = sorted(set(getattr(model.config, "layer_types", None) or ()))
    if len(kinds) > 1:  # the first block's mask would serve them all
        raise ValueError(f"calibration handles blocks that attend in one way; this model's are {', '.join(kinds)}")
    by_block: dict[int, list[tuple[str, nn.Linear]]] = {}
    for name, layer in linears(model):
        by_block.setdefault(int(name.split(".")[2]), []).append((name, layer))
    calls = [_first_call(model, document) for document in documents]
    for index, block in enumerate(blocks(model)):
        found: dict[str, list[Tensor]] = {name: [] for name, _ in by_block[index]}
        hooks = [
            layer.register_forward_pre_hook(
                lambda module, args, caught=found[name]: caught.append(args[0].flatten(0, -2).clone())
            )
            for name, layer in by_block[index]
        ]
        for states, settings in calls:
            block(states, **settings)
        for hook in hooks:
            hook.remove()
        for name, layer in by_block[index]:
            visit(name, layer, torch.cat(found[name]))
        calls = [(_states(block(states, **settings)), settings) for states, settings in calls]


class _Caught(Exception):
    pass


def _first_call(model: PreTrainedModel, document: Sequence[int]) -> tuple[Tensor, dict[str, object]]:
    """Return what the first block is called with, one document at a time, so that nothing is padding."""
    found: list[tuple[Tensor, dict[str, object]]] = []

    def catch(module: nn.Module, args: tuple[Tensor, ...], settings: dict[str, object]) -> None:
        found.append((args[0], settings))
        raise _Caught

    hook = blocks(model)[0].register_forward_pre_hook(catch, with_kwargs=True)
    try:
        model(input_ids=pad([document]).token_ids.to(model.device), use_cache=False)
    except _Caught:
        pass
    finally:
        hook.remove()
    return found[0]


def _states(output: Tensor | tuple[Tensor, ...]) -> Tensor:
    return output if isinstance(output, Tensor) else output[0]


def zeros(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return layer to [O, I] bool: which of its weights are zero."""
    return {name: layer.weight == 0 for name, layer in linears(model)}


@torch.no_grad()
def put_zeros(model: PreTrainedModel, where: Mapping[str, Tensor]) -> None:
    """Zero weights again that were zero, see `zeros`; a layer whose name is not there stays as it is."""
    for name, layer in linears(model):
        if name in where:
            layer.weight.masked_fill_(where[name], 0)
