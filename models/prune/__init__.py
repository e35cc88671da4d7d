"""Pruning: zeroes in the weights of linear layers, whose shapes stay.

Letters: O outputs and I inputs of a layer, N calibration tokens X [N, I].

A method's module has `prune(weight [O, I], inputs, pattern, params) -> [O, I]`, of the dtype of `weight`, which stays
as it is, `inputs` being XᵀX and N, and `CALIBRATED`: whether it reads `inputs`. ValueError where these or the pattern
don't fit the layer. `prune_model` walks over a model.

Speed and size stay too: nothing here multiplies sparse matrices on a CPU, and a file holds the zeroes.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from models import catalog
from models.core.checkpoints.invariants import note
from models.core.checkpoints.sparsity import Pattern, require_groups
from models.core.layers.linears import Gram, calibrate, linears
from models.params import BaseParams

CHANGES, KEEPS = ("low rank",), ("zeroes",)  # of every method


def require_inputs(weight: Tensor, inputs: Gram, num_tokens: int = 1) -> None:
    """Raise ValueError if calibration inputs don't fit a layer or are fewer than `num_tokens`."""
    if inputs.num_tokens < num_tokens:
        raise ValueError(f"calibration has {inputs.num_tokens} tokens; wanted at least {num_tokens}")
    if len(inputs.matrix) != weight.shape[1]:
        raise ValueError(f"inputs are {len(inputs.matrix)} wide; wanted {weight.shape[1]}, as wide as the weight")


@torch.no_grad()
def prune_model(
    model: PreTrainedModel, documents: Sequence[Sequence[int]], params: BaseParams, pattern: Pattern
) -> dict[str, float]:
    """Zero weights of all linear layers of the decoder blocks, in place, and return the share of zeroes of each.

    Each block is pruned on the inputs that the pruned blocks before it give, and what was zero before stays so. The
    config notes each layer's pattern, so that what comes after keeps it (`models.core.checkpoints.invariants`).
    ValueError if a layer does not fit the pattern or can't be handled (names it), or calibration is too short. What
    shapes alone tell is told before anything is changed.
    """
    method = catalog.load("prune", params.name)
    for name, layer in linears(model):
        require_groups(layer.weight.shape, pattern, f"layer {name}")

    def visit(name: str, layer: nn.Linear, inputs: Gram) -> None:
        try:
            pruned = method.prune(layer.weight, inputs, pattern, params)
            layer.weight.copy_(pruned.masked_fill(layer.weight == 0, 0))
        except ValueError as error:
            raise ValueError(f"layer {name}: {error}") from error

    if method.CALIBRATED:
        calibrate(model, documents, Gram, visit)
    else:
        for name, layer in linears(model):
            visit(name, layer, Gram())
    note(model, "patterns", {name: pattern.model_dump(exclude_none=True) for name, _ in linears(model)})
    return {name: float((layer.weight == 0).float().mean()) for name, layer in linears(model)}
