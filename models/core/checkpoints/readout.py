"""A causal language model by its parts, of whatever layout: embedding, decoder layers, last norm, what makes logits.

No layout is listed here. transformers says which module is which, and its own forward pass turns normed states into
logits, with the scale, the soft cap or the bias that a family has. Of a directory the parts are found in a model
without weights (on the meta device), and only their own tensors are read.

Letters: n rows, H hidden width, V vocabulary, D rows of the output matrix.
"""

import copy
import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions

from models.core.checkpoints.loading import read_tensor


def input_embedding(directory: Path) -> Tensor:
    """[V, H] the vectors that a model has for its tokens, before any scale of its family, in float32."""
    model = _skeleton(directory)
    return _read(directory, model, model.get_input_embeddings())["weight"]


def output_embedding(directory: Path) -> Tensor:
    """[V, H] a model's output matrix, which may be its input embedding, in float32."""
    return _output_parts(directory)["weight"]


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """Return the layers between which the residual stream runs; ValueError if they can't be told."""
    wanted = model.config.num_hidden_layers
    for part in model.get_decoder().children():
        if isinstance(part, nn.ModuleList) and len(part) == wanted:
            return part
    raise ValueError(f"{type(model).__name__} has no list of {wanted} decoder layers")


def last_norm(model: PreTrainedModel) -> nn.Module:
    """Return the norm between the last residual stream and the output matrix; ValueError if there is none."""
    for part in reversed(list(model.get_decoder().children())):
        if "norm" in type(part).__name__.lower():
            found: nn.Module = part
            return found
    raise ValueError(f"{type(model).__name__} has no norm after its decoder layers")


class Readout:
    """From a model's last residual stream to its logits."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Take the model's own parts, which go on being shared with it."""
        self.norm, self._head = last_norm(model), model.get_output_embeddings()
        self._model = copy.copy(model)
        self._model._modules = dict(model._modules)
        setattr(self._model, model.base_model_prefix, _Passed())

    @classmethod
    def load(cls, directory: Path, device: torch.device | str = "cpu", rows: Tensor | None = None) -> Self:
        """Read the parts of a model directory in float32; of the output matrix only `rows` [D], if they are given."""
        model = _skeleton(directory)
        readout, parts = cls(model), _output_parts(directory)
        if rows is not None:
            parts = {name: part[rows.cpu()] for name, part in parts.items()}
        num_rows, width = parts["weight"].shape
        head = nn.Linear(width, num_rows, "bias" in parts, device="meta")
        setattr(readout._model, _name(model, readout._head), head)
        readout._head, norm = _filled(head, parts, device), readout.norm
        readout.norm = _filled(copy.deepcopy(norm), _read(directory, model, norm), device)
        return readout

    @property
    def matrix(self) -> Tensor:
        """[D, H] what normed states are multiplied by."""
        weight: Tensor = self._head.weight
        return weight.detach()

    @property
    def gain(self) -> Tensor:
        """[H] what the last norm multiplies each channel by."""
        signs = torch.ones_like(self.matrix[0])
        signs[1::2] = -1  # of mean 0 and root mean square 1, so that norms of both kinds only multiply it
        gain: Tensor = (self.norm(signs) - self.norm(-signs)) / 2 * signs
        return gain.detach()

    @property
    def scale(self) -> float:
        """What a family multiplies the output matrix's products by, where they are small."""
        row = self.matrix[self.matrix.norm(dim=-1).argmax(), None]
        unit = row / row.square().sum()
        odd = self.logits(unit) - self.logits(-unit)  # without a bias
        return float(f"{odd.max() / 2:.3g}")  # exactly 1 in most families

    def logits(self, normed: Tensor) -> Tensor:
        """[n, H] normed states → [n, D] logits, in the number format of the model."""
        made: Tensor = self._model(inputs_embeds=normed[None], use_cache=False).logits[0]
        return made


class _Passed(nn.Module):
    """Stands where a decoder stood, and hands on what comes in as if it had computed it."""

    @property
    def decoder(self) -> Self:
        return self

    def forward(self, *_: Any, inputs_embeds: Tensor, **__: Any) -> "_Computed":
        return _Computed(last_hidden_state=inputs_embeds)  # type: ignore[arg-type]  # any tensor will do


@dataclass
class _Computed(BaseModelOutputWithPastAndCrossAttentions):
    """All that families read of a decoder's output."""

    router_logits: Tensor | None = None


def _skeleton(directory: Path) -> PreTrainedModel:
    return _skeleton_of((directory / "config.json").read_text())


@lru_cache(maxsize=4)
def _skeleton_of(config_json: str) -> PreTrainedModel:
    """Make a model without weights, once for a config."""
    said = json.loads(config_json)
    said.pop("quantization_config", None)
    config = AutoConfig.for_model(**said)
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    model.eval()
    return model


def _name(model: nn.Module, part: nn.Module | None) -> str:
    names: list[str] = [name for name, module in model.named_modules() if module is part]
    return names[0]


def _output_parts(directory: Path) -> dict[str, Tensor]:
    """Read the output matrix [V, H], and the bias [V] where a family has one."""
    model = _skeleton(directory)
    if model.config.tie_word_embeddings:
        return {"weight": input_embedding(directory)}
    return _read(directory, model, model.get_output_embeddings())


def _read(directory: Path, model: PreTrainedModel, part: nn.Module | None) -> dict[str, Tensor]:
    """Read a part's tensors in float32, under the names that files of the family have for them."""
    assert part is not None
    found = {}
    for key, empty in part.state_dict().items():
        stored = next(iter(revert_weight_conversion(model, {f"{_name(model, part)}.{key}": empty})))
        found[key] = read_tensor(directory, stored).float()
    return found


def _filled(module: nn.Module, tensors: dict[str, Tensor], device: torch.device | str) -> nn.Module:
    module.to_empty(device=device).float().load_state_dict(tensors)
    return module.requires_grad_(False)
