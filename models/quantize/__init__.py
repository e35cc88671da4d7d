"""Quantization: fewer bits a weight, an activation or a cached key, and what that costs.

Letters: O outputs and I inputs of a layer, N tokens, G groups of a row.

A method's module has

- `CALIBRATED`: whether it reads `documents`;
- `STORED`: the compressed-tensors format in which an engine serves its result, or None where none does; `ELSEWHERE`
  then says in a line why, and where its place is;
- `quantize(model, documents, params) -> Quantized`, which uses up `model`, in float32: its linear layers inside of the
  decoder blocks are quantized, the rest is rounded to bfloat16. Of what is stored, a weight of 0 stays 0. ValueError
  where documents, token ids to calibrate on, are too little text, and of a layer that can't be handled or whose rows
  groups don't fill; names it;
- where the model should have been trained for it, with the same settings, `Hooks(params, rng)`, a
  `models.regimes.Regime`: the training loop's, under which the model computes as the quantized one will.

A `Quantized` holds the model that computes as the quantized one does and, by itself, all that a file of it has: sizes
are counted, not claimed.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from pydantic import Field
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from models import catalog
from models.core.checkpoints import compressed
from models.core.layers import integers
from models.core.layers.integers import Integers
from models.core.layers.linears import linears
from models.core.learning import training
from models.params import BaseParams, TrainingParams
from models.regimes import Regime

CHANGES = ("low rank",)  # of every method
# The least text that says what a layer reads, and the columns that one-shot methods work through at a time.
BLOCK = 128


class Grid(BaseParams):
    """Integers that share a scale by groups, stored in bfloat16 so that the file says what is computed with.

    Attributes:
        bits: of a weight; engines serve 4, and 8 on GPUs.
        group_size: weights of a row that share a scale.
        symmetric: whether 0 is the middle of the grid; else each group has a zero point.
    """

    bits: int = Field(4, ge=2, le=8)
    group_size: Literal[32, 64, 128] = 128
    symmetric: bool = True

    def round(self, weight: Tensor) -> Integers:
        """Round [O, I] to the nearest."""
        return integers.quantize(weight, self.bits, self.group_size, self.symmetric, torch.bfloat16)

    @property
    def scheme(self) -> dict[str, Any] | None:
        return compressed.packed_scheme(self.bits, self.group_size, self.symmetric)


class Rounding(Regime):
    """Hooks under which linear layers compute by `forward`; they refuse what `check` does, and draw nothing."""

    def forward(self, layer: nn.Linear, inputs: Tensor) -> Tensor:
        """[..., I] → [..., O]."""
        raise NotImplementedError

    def start(self, model: PreTrainedModel, num_steps: int) -> None:
        check(model, getattr(self.params, "group_size", None))
        for _, layer in linears(model):
            layer.forward = partial(self.forward, layer)  # type: ignore[method-assign]  # until `finish`

    def finish(self, model: PreTrainedModel) -> None:
        for _, layer in linears(model):
            del layer.forward


class Quantized(NamedTuple):
    """A quantized model, and what the method says of itself."""

    model: PreTrainedModel  # computes as the quantized model does, in float32
    tensors: dict[str, Tensor]  # all that a file of it holds, by name
    scheme: dict[str, Any] | None = None  # config.json's `quantization_config` for engines, None where none reads it
    figures: dict[str, float] = {}  # noqa: RUF012 - never changed

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())


def train_for(
    method: BaseParams,
    model: PreTrainedModel,
    documents: Sequence[Sequence[int]],
    params: TrainingParams,
    seed: int = 0,
    work_dir: Path | None = None,
    on_progress: training.OnProgress | None = None,
) -> training.Trained | None:
    """Train a model in place as its quantization wants it, before `quantize`; None where the method wants nothing.

    The seed is of the order of batches and of what the method draws; for all else see
    `models.core.learning.training.train`.
    """
    module = catalog.load("quantize", method.name)
    if not hasattr(module, "Hooks"):
        return None
    hooks = module.Hooks(method, torch.Generator().manual_seed(seed))
    return training.train(model, documents, params, [hooks], seed, work_dir, on_progress)


def save(quantized: Quantized, directory: Path) -> None:
    """Write config.json and safetensors into `directory`, as engines and transformers load them; ValueError if no
    engine reads this form."""
    if quantized.scheme is None:
        served = [name for name in catalog.names("quantize") if catalog.load("quantize", name).STORED]
        raise ValueError(f"no engine reads this quantized form; those of these methods are: {', '.join(served)}")
    tensors = {name: tensor.detach().contiguous().cpu() for name, tensor in quantized.tensors.items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    config = quantized.model.config.to_dict() | {"dtype": "bfloat16", "quantization_config": quantized.scheme}
    config.pop("_name_or_path", None)  # a path of this machine
    (directory / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def check(model: PreTrainedModel, group_size: int | None = None) -> None:
    """Say all that can be said against quantizing a model before anything is changed; ValueError if it is not in
    float32, a layer can't be handled, or groups don't fill the rows of one; names it."""
    for name, layer in linears(model):
        if layer.weight.dtype != torch.float32:
            raise ValueError(f"layer {name} is in {layer.weight.dtype}; models are quantized in float32")
        if group_size is not None and layer.in_features % group_size:
            raise ValueError(f"group_size {group_size} does not divide the width {layer.in_features} of layer {name}")


def check_documents(documents: Sequence[Sequence[int]]) -> None:
    """Raise ValueError if there is too little text to calibrate on."""
    num_tokens = sum(map(len, documents))
    if num_tokens < BLOCK:
        raise ValueError(f"calibration takes {BLOCK} tokens or more; got {num_tokens} in {len(documents)} documents")


@torch.no_grad()
def round_each(
    model: PreTrainedModel, code: Callable[[str, nn.Linear], tuple[Tensor, Mapping[str, Tensor]]]
) -> dict[str, Mapping[str, Tensor]]:
    """Quantize weights in place, layer by layer, where nothing else of a layer changes; return what is stored of it.
    `code` says what stands for a layer's weight now, [O, I], and the tensors that are stored instead of it."""
    parts = {}
    for name, layer in linears(model):
        weight, parts[name] = code(name, layer)
        layer.weight.copy_(weight)
    return parts


def round_to(model: PreTrainedModel, params: Grid) -> Quantized:
    """Quantize weights to the nearest of a grid; ValueError as `check`."""
    check(model, params.group_size)

    def code(name: str, layer: nn.Linear) -> tuple[Tensor, dict[str, Tensor]]:
        rounded = params.round(layer.weight)
        return rounded.floats(), compressed.packed_parts(rounded, params.bits)

    return assemble(model, round_each(model, code), params.scheme)


@torch.no_grad()
def assemble(
    model: PreTrainedModel,
    parts: Mapping[str, Mapping[str, Tensor]],
    scheme: dict[str, Any] | None = None,
    figures: Mapping[str, float] | None = None,
) -> Quantized:
    """Round what is not quantized to bfloat16, and gather all that is stored; see `Quantized`. `parts` are of each
    quantized layer the tensors that are stored instead of its weight."""
    tensors = {f"{layer}.{part}": tensor for layer, stored in parts.items() for part, tensor in stored.items()}
    for name, parameter in model.named_parameters():  # a tied matrix comes once
        layer, _, leaf = name.rpartition(".")
        if leaf == "weight" and layer in parts:
            continue
        tensors[name] = parameter.to(torch.bfloat16)
        parameter.copy_(tensors[name])
    return Quantized(model.requires_grad_(False).eval(), tensors, scheme, dict(figures or {}))
