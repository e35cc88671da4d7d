"""EAGLE: one decoder layer that goes on with the features that the target's output matrix reads.

    f̂(t+1) = layer(W [E(x(t+1)); f(t)] ≤ t),   q = softmax(W_out f̂)

The feature of a token is the target's last hidden state, normed; the token that was drawn after it settles what the
feature alone leaves open. The layer has no norm before its attention. E and W_out are the target's; of W_out the rows
of the commonest tokens, which the paper has all of and which at small sizes are most of what a pass multiplies. They
are not learnt, so which ones they are can follow the traffic. Training is of one step, with the target's features:
smooth L1 to the next feature and a tenth of the cross-entropy to its distribution; uniform noise on the features stands
for the errors that further steps start from.

With FSPAD (`models.drafting.fspad`), two options: the embedding gates what the two together become, and the layer makes
a vector to say tokens from and another that is the feature. Loss and weights are the same.

A draft of the target's whole vocabulary is in the layout of vLLM's EAGLE, and served; one of a part of it is not,
nor one with FSPAD (read in vLLM 0.32: model_executor/models/llama_eagle.py has no map of tokens, and neither part).
"""

from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from models.checkpoints.checkpoint import tensor_names
from models.drafting.borrowing import Format
from models.drafting.draft_files import fused, read_config, require_whole_vocabulary
from models.drafting.draft_format import WEIGHTS
from models.drafting.features import decoder_layer, linear
from models.drafting.fspad import OPTIONS, FspadDraft
from models.drafts import EngineWeights, Procedure
from models.losses import feature_regression
from models.params import BaseParams

PAPER = "arXiv:2401.15077; its options: arXiv:2408.15562"
FAMILY = "eagle"
ARCHITECTURES = ("EagleLlamaForCausalLM",)
TRAINED = True
SERVED = True


class Params(BaseParams):
    """What is a new draft's own.

    Attributes:
        vocab_size: D, at most the target's; 0 is all of it, which is what vLLM can serve.
        noise: features are off by up to this in training, each entry by itself.
        feature_sampling: the token's embedding gates what it and the feature before become (FSPAD).
        partial_alignment: what says tokens is not what is aligned with the target's feature (FSPAD).
    """

    name: Literal["eagle"] = "eagle"
    vocab_size: int = Field(4096, ge=0)
    noise: float = Field(0.1, ge=0)
    feature_sampling: bool = False
    partial_alignment: bool = False

    @property
    def chosen(self) -> tuple[str, ...]:
        """The options that are true."""
        return tuple(name for name in OPTIONS if getattr(self, name))


class Eagle(FspadDraft):
    """The layer; parameters carry the names of the checkpoint."""

    max_unroll = 1  # in training every step reads the target's features
    procedure = Procedure(loss=feature_regression.Params(), follow="all", step_decay=1.0)

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        hidden = config["hidden_size"]
        self.fc = linear(2 * hidden, hidden)
        self.layers = nn.ModuleList([self.widen(decoder_layer(config, hidden, ()))])

    @property
    def layer(self) -> Any:
        """See the base, as are the next two."""
        return self.layers[0]

    def join(self, state: Tensor, token_ids: Tensor) -> Tensor:
        """One product of the embedding and the feature; J = H."""
        embedded = functional.embedding(token_ids, self.embedding)
        return self.sampled(self.fc(torch.cat([embedded, self.fed(state)], dim=-1)), embedded)

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
    own = {"feature_noise": params.noise, **dict.fromkeys(params.chosen, True)}
    draft = _format.start(params.vocab_size, own, target_dir, token_counts)
    draft.start_as_last_layer(target_dir)
    hidden = draft.config["hidden_size"]
    with torch.no_grad():
        draft.fc.weight.copy_(torch.cat([torch.zeros(hidden, hidden), torch.eye(hidden)], dim=-1))
    return draft


def require_served(params: Params, num_draft_tokens: int) -> None:
    """See `models.drafts.Limited`."""
    require_whole_vocabulary(FAMILY, params.vocab_size, 0)
    _require_plain(params.chosen)


def vllm_config(directory: Path) -> dict[str, Any]:
    """See `models.drafts.Family`; ValueError for a draft of a part of the vocabulary, or with FSPAD."""
    config = read_config(directory, FAMILY, ARCHITECTURES)
    require_whole_vocabulary(FAMILY, config["draft_vocab_size"], config["vocab_size"])
    _require_plain(tuple(name for name in OPTIONS if config.get(name)))
    return {"method": "eagle", "model": str(directory)}


def vllm_weights(directory: Path) -> EngineWeights:
    """Return the file, with vLLM's names for its tensors."""
    file = directory / WEIGHTS
    return EngineWeights(file, fused({f"model.{name}": name for name in tensor_names(file)}))


def _require_plain(chosen: tuple[str, ...]) -> None:
    """Raise ValueError if a draft has options that vLLM does not compute."""
    if chosen:
        raise ValueError(
            f"vLLM's drafts of family {FAMILY} have no {' and no '.join(chosen)}: leave it out of [draft], or engine "
            '"torch"'
        )
