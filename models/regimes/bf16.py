"""Mixed precision: products in bfloat16, weights, optimizer and loss in float32.

bfloat16 has float32's exponent, so nothing is scaled to keep gradients from vanishing. On a CPU without bfloat16 units
a step takes longer, not shorter (see `fast_dtype`). What is held for the backward pass is less by the activations of
products; the weights' bfloat16 copies are held as well, so it pays for batches of more tokens than a layer is wide.
"""

from contextlib import AbstractContextManager
from typing import Literal

import torch
from transformers import PreTrainedModel

from models.params import BaseParams
from models.regimes import Regime

PAPER = "arXiv:1710.03740, section 3.1; arXiv:1905.12322"
CHANGES = ("precision",)


class Params(BaseParams):
    """Nothing to set."""

    name: Literal["bf16"] = "bf16"


class Hooks(Regime):
    """Refuses weights that are not in float32."""

    def start(self, model: PreTrainedModel, num_steps: int) -> None:
        if model.dtype != torch.float32:
            raise ValueError(f"bf16 keeps weights in float32; the model's are {model.dtype}")
        self.device = model.device.type

    def around(self, step: int) -> AbstractContextManager[object]:
        return torch.autocast(self.device, torch.bfloat16)

    def answering(self, model: PreTrainedModel) -> AbstractContextManager[object]:
        return torch.autocast(model.device.type, torch.bfloat16)
