"""BitFit: only biases are trained.

Models of Llama's kind have none, so zero biases are added wherever the class can hold one: where its config has
`attention_bias` and `mlp_bias` they are switched on, and transformers and vLLM load the result as any model. Other
classes train the biases that they have (Qwen2: query, key and value), and one that can hold none is refused. RMS norms
can hold none anywhere.

The gradient of a bias is the sum of its layer's output gradient: no layer's input is kept for the backward pass
(TinyTL, arXiv:2007.11622). What attention, norms and the products inside the MLP need for the gradient of the data is.
"""

from typing import Literal

import torch
from torch import nn
from transformers import PreTrainedModel

from models.core.layers.linears import linears
from models.params import BaseParams

PAPER = "arXiv:2106.10199, section 3"
LEARNING_RATE = 3e-3
KEEPS = ("frozen weights", "weight gradients")
# What configs of transformers call the biases of linear layers.
FLAGS = ("attention_bias", "mlp_bias")


class Params(BaseParams):
    """Nothing to set."""

    name: Literal["bitfit"] = "bitfit"


def insert(model: PreTrainedModel, params: Params, rng: torch.Generator) -> None:
    """Add zero biases where the class can hold them, and train all there are; see `models.adapters`. ValueError if no
    layer of the model can have a bias."""
    for flag in FLAGS:
        if hasattr(model.config, flag):
            setattr(model.config, flag, True)
    with torch.device("meta"):
        holds = type(model)(model.config).state_dict().keys()
    for name, layer in linears(model):
        if layer.bias is None and f"{name}.bias" in holds:
            layer.bias = nn.Parameter(layer.weight.new_zeros(layer.out_features))
    biases = [parameter for name, parameter in model.named_parameters() if name.endswith(".bias")]
    if not biases:
        raise ValueError(f"no layer of {type(model).__name__} can have a bias, so BitFit has nothing to train")
    for bias in biases:
        bias.requires_grad_(True)


def fold(model: PreTrainedModel) -> None:
    """Leave the model as it is: biases that its config names are plain; see `models.adapters`."""
