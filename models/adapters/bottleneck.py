"""Bottleneck adapters: small networks h + U·gelu(D h + d) + u, two in each block, on what attention and MLP put out.

As in the paper each sits on the sublayer's output before that is added to the residual stream, and has its own skip
connection. Weights are drawn from a Gaussian of deviation 0.01 cut at two deviations, and biases are zero, so that the
model starts as nearly its base: a new module of m = 64 adds under 1% of what it reads. The norms are trained with them.

With m in the middle of a width of E a block trains 2(2mE + m + E) + 2E parameters: 0.5–8% of the paper's model for m of
8 to 256. The nonlinearity keeps them from being folded into the model: no plain model computes the same.
"""

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from transformers import PreTrainedModel

from models.core.layers.linears import blocks
from models.params import BaseParams

PAPER = "Houlsby et al., Parameter-Efficient Transfer Learning for NLP, ICML 2019 (arXiv:1902.00751), section 2.1"
LEARNING_RATE = 1e-3
ELSEWHERE = "no plain model computes the same, and engines serve plain ones; redraft compare adapters measures it"
DEVIATION = 0.01
# What attention and MLP of Llama's layout end with.
LAST_LAYERS = ("self_attn.o_proj", "mlp.down_proj")


class Params(BaseParams):
    """The adapter's size."""

    name: Literal["bottleneck"] = "bottleneck"
    width: int = Field(64, ge=1, description="m, the numbers in the middle of an adapter.")


class Bottleneck(nn.Module):
    """A linear layer with an adapter behind it: [..., I] → [..., E]."""

    def __init__(self, base: nn.Linear, width: int, rng: torch.Generator) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.out_features, width, device=base.weight.device, dtype=base.weight.dtype)
        self.up = nn.Linear(width, base.out_features, device=base.weight.device, dtype=base.weight.dtype)
        with torch.no_grad():
            for layer in (self.down, self.up):
                drawn = nn.init.trunc_normal_(torch.empty(layer.weight.shape), 0, 1, -2, 2, generator=rng)
                layer.weight.copy_(DEVIATION * drawn)
                layer.bias.zero_()

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.base(inputs)
        added: Tensor = self.up(nn.functional.gelu(self.down(outputs)))
        return outputs + added


def insert(model: PreTrainedModel, params: Params, rng: torch.Generator) -> None:
    """Put two adapters into each block, and let the blocks' norms be trained; see `models.adapters`. ValueError if
    attention and MLP don't end with linear layers of Llama's names, or are no wider than the middle."""
    width = model.config.hidden_size
    if params.width >= width:
        raise ValueError(f"width must be less than the model's {width}; got {params.width}")
    for number, block in enumerate(blocks(model)):
        modules = dict(block.named_modules())
        for name in LAST_LAYERS:
            if not isinstance(layer := modules.get(name), nn.Linear):
                raise ValueError(f"model.layers.{number} has no linear layer {name} to put an adapter behind")
            parent, _, leaf = name.rpartition(".")
            setattr(block.get_submodule(parent), leaf, Bottleneck(layer, params.width, rng))
        for name, parameter in block.named_parameters():
            # A vector that is called a weight is the scale of a norm.
            if name.endswith(".weight") and parameter.ndim == 1:
                parameter.requires_grad_(True)
