"""EAGLE: one decoder layer that goes on with the features that the target's output matrix reads.

    f̂(t+1) = layer(W [E(x(t+1)); f(t)] ≤ t),   q = softmax(W_out f̂)

The feature of a token is the target's last hidden state, normed; the token that was drawn after it settles what the
feature alone leaves open. The layer has no norm before its attention. E and W_out are the target's; of W_out the rows
of the commonest tokens, which the paper has all of and which at small sizes are most of what a pass multiplies. They
are not learnt, so which ones they are can follow the traffic. Training is of one step, with the target's features:
smooth L1 to the next feature and a tenth of the cross-entropy to its distribution; uniform noise on the features stands
for the errors that further steps start from.

A draft of the target's whole vocabulary is in the layout of vLLM's EAGLE, and served; one of a part of it is not
(read in vLLM 0.32: model_executor/models/llama_eagle.py has no map of tokens).
"""

from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from models.borrowing import Format, NormedDraft
from models.checkpoint import read_tensor, tensor_names
from models.draft_files import fused, read_config, require_whole_vocabulary
from models.draft_format import WEIGHTS
from models.drafts import EngineWeights, Procedure
from models.features import decoder_layer, linear
from models.losses import feature_regression
from models.params import BaseParams

PAPER = "arXiv:2401.15077"
FAMILY = "eagle"
ARCHITECTURES = ("EagleLlamaForCausalLM",)
TRAINED = True
SERVED = True


class Params(BaseParams):
    """What is a new draft's own.

    Attributes:
        vocab_size: D, at most the target's; 0 is all of it, which is what vLLM can serve.
        noise: features are off by up to this in training, each entry by itself.
    """

    name: Literal["eagle"] = "eagle"
    vocab_size: int = Field(4096, ge=0)
    noise: float = Field(0.1, ge=0)


class Eagle(NormedDraft):
    """The layer; parameters carry the names of the checkpoint."""

    max_unroll = 1  # in training every step reads the target's features
    procedure = Procedure(loss=feature_regression.Params(), follow="all", step_decay=1.0)

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        hidden = config["hidden_size"]
        self.fc = linear(2 * hidden, hidden)
        self.layers = nn.ModuleList([decoder_layer(config, hidden, ())])

    @property
    def layer(self) -> Any:
        """See the base, as are the next two."""
        return self.layers[0]

    def join(self, state: Tensor, token_ids: Tensor) -> Tensor:
        """One product of the embedding and the feature; J = H."""
        joined: Tensor = self.fc(torch.cat([functional.embedding(token_ids, self.embedding), state], dim=-1))
        return joined

    def residual(self, state: Tensor, joined: Tensor) -> Tensor:
        """The product."""
        return joined


_format = Format(FAMILY, ARCHITECTURES, Eagle)
renew, save, load, check = _format.renew, _format.save, _format.load, _format.check


def create(params: Params, target_dir: Path, token_counts: np.ndarray) -> Eagle:
    """Make a draft whose layer is the target's last, and to which the embedding says nothing yet.

    Args:
        params: what it is trained with.
        target_dir: the target's directory (Llama layout).
        token_counts: [V] how often each target token occurs in the traffic.

    Raises:
        ValueError: the target is of another layout, or has fewer tokens than the draft.
    """
    draft = _format.start(params.vocab_size, {"feature_noise": params.noise}, target_dir, token_counts)
    hidden = draft.config["hidden_size"]
    with torch.no_grad():
        draft.fc.weight.copy_(torch.cat([torch.zeros(hidden, hidden), torch.eye(hidden)], dim=-1))
        for name, parameter in draft.layer.named_parameters():
            parameter.copy_(read_tensor(target_dir, f"model.layers.{draft.num_target_layers - 1}.{name}"))
    return draft


def require_served(params: Params, num_draft_tokens: int) -> None:
    """See `models.drafts.Limited`."""
    require_whole_vocabulary(FAMILY, params.vocab_size, 0)


def vllm_config(directory: Path) -> dict[str, Any]:
    """See `models.drafts.Family`; ValueError for a draft of a part of the vocabulary."""
    config = read_config(directory, FAMILY, ARCHITECTURES)
    require_whole_vocabulary(FAMILY, config["draft_vocab_size"], config["vocab_size"])
    return {"method": "eagle", "model": str(directory)}


def vllm_weights(directory: Path) -> EngineWeights:
    """Return the file, with vLLM's names for its tensors."""
    file = directory / WEIGHTS
    return EngineWeights(file, fused({f"model.{name}": name for name in tensor_names(file)}))
