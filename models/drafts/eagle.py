"""EAGLE: one decoder layer that goes on with the features that the target's output matrix reads.

    f̂(t+1) = layer(W [E(x(t+1)); f(t)] ≤ t),   q = softmax(W_out f̂)

The feature of a token is the target's last hidden state, normed; the token that was drawn after it settles what the
feature alone leaves open. The layer has no norm before its attention. E and W_out are the target's; of W_out the rows
of the commonest tokens. Training is of one step, with the target's features: smooth L1 to the next feature and a tenth
of the cross-entropy to its distribution; uniform noise on the features stands for the errors that further steps start
from.

With FSPAD, two options, with the same loss and weights, which add nothing to a new draft. Feature sampling: what a
feature leaves open, the token after it settles; its embedding e says in the width of an MLP what of the two is taken:

    s = g + W_down (SiLU(W_gate e) ⊙ W_up norm(g)),   g = W [e; f]

Partial alignment: a feature that is near the target's may say the wrong token, and one that says the right token may be
far from it. So the layer's MLP ends in two vectors, h + MLP(h)₁ and h + MLP(h)₂: the first is what tokens are said
from, and is trained by these alone; the second is aligned with the target's feature, and is what the next step reads.

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

from models.core.checkpoints.loading import read_tensor
from models.core.drafting.borrowing import Format, NoisyDraft
from models.core.drafting.draft_format import engine_weights, require_whole_vocabulary
from models.core.drafting.features import Scale, decoder_layer, linear
from models.drafts import EngineWeights, Procedure
from models.losses import feature_regression
from models.params import BaseParams

PAPER = "arXiv:2401.15077; its options: arXiv:2408.15562, github.com/Luc4Gui/FSPAD"
FAMILY = "eagle"
ARCHITECTURES = ("EagleLlamaForCausalLM",)
SERVED = True
OPTIONS = ("feature_sampling", "partial_alignment")


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
        return tuple(name for name in OPTIONS if getattr(self, name))


class Sampler(nn.Module):
    def __init__(self, width: int, inner: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.post_attention_layernorm = Scale(width)  # the name that its code gives it
        into = {"gate_proj": linear(width, inner), "up_proj": linear(width, inner)}
        self.mlp = nn.ModuleDict({**into, "down_proj": linear(inner, width)})

    def forward(self, joined: Tensor, embedded: Tensor) -> Tensor:
        """[…, H] g and […, H] embeddings → […, H] s."""
        normed = functional.rms_norm(joined, joined.shape[-1:], self.post_attention_layernorm.weight, self.eps)
        gated = functional.silu(self.mlp["gate_proj"](embedded)) * self.mlp["up_proj"](normed)
        sampled: Tensor = joined + self.mlp["down_proj"](gated)
        return sampled


class Eagle(NoisyDraft):
    """The layer; parameters carry the names of the checkpoint.

    Between two steps it hands on what was said from and what is fed on, side by side, [n, 2 H], or only one where the
    two are the same.
    """

    max_unroll = 1  # in training every step reads the target's features
    procedure = Procedure(loss=feature_regression.Params(), follow="all", step_decay=1.0)

    def __init__(self, config: dict[str, Any]) -> None:
        """See the base; ValueError if one of the options is neither true nor false."""
        super().__init__(config)
        for name in OPTIONS:
            if not isinstance(config.get(name, False), bool):
                raise ValueError(f"{name} must be true or false; got {config[name]!r}")
        hidden, inner = config["hidden_size"], config["intermediate_size"]
        self.sampler = Sampler(hidden, inner, self.eps) if config.get("feature_sampling", False) else None
        self.fc = linear(2 * hidden, hidden)
        layer: Any = decoder_layer(config, hidden, ())
        if config.get("partial_alignment", False):
            layer["mlp"]["down_proj"] = linear(inner, 2 * hidden)
        self.layers = nn.ModuleList([layer])

    def join(self, state: Tensor, token_ids: Tensor) -> Tensor:
        embedded = functional.embedding(token_ids, self.embedding)
        joined: Tensor = self.fc(torch.cat([embedded, self.fed(state)], dim=-1))
        return joined if self.sampler is None else self.sampler(joined, embedded)

    def residual(self, state: Tensor, joined: Tensor) -> Tensor:
        return joined

    def fed(self, state: Tensor) -> Tensor:
        """[…, H] features or […, 2 H] what a step handed on → […, H] the part that is fed on."""
        return state[..., -self.config["hidden_size"] :]

    def say(self, state: Tensor, step: int = 0) -> tuple[Tensor, Tensor]:
        return self.fed(state), super().say(state[..., : self.config["hidden_size"]], step)[1]


_format = Format(FAMILY, ARCHITECTURES, Eagle)
renew, save, load, check = _format.renew, _format.save, _format.load, _format.check


def create(params: Params, target_dir: Path, token_counts: np.ndarray) -> Eagle:
    """Make a draft whose layer is the target's last, and to which the embedding says nothing yet; see
    `models.drafts.Family`."""
    own = {"feature_noise": params.noise, **dict.fromkeys(params.chosen, True)}
    draft = _format.start(params.vocab_size, own, target_dir, token_counts)
    hidden, last = draft.config["hidden_size"], f"model.layers.{draft.num_target_layers - 1}"
    with torch.no_grad():
        for module in (draft.layer, *([draft.sampler] if draft.sampler else [])):
            for name, parameter in module.named_parameters():
                stored = read_tensor(target_dir, f"{last}.{name}")
                parameter.copy_(stored if parameter.shape == stored.shape else torch.cat([stored, stored]))
        if draft.sampler is not None:
            draft.sampler.mlp.get_parameter("down_proj.weight").zero_()
        draft.fc.weight.copy_(torch.cat([torch.zeros(hidden, hidden), torch.eye(hidden)], dim=-1))
    return draft


def require_served(params: Params, num_draft_tokens: int) -> None:
    require_whole_vocabulary(FAMILY, params.vocab_size, 0)
    _require_plain(params.chosen)


def vllm_config(directory: Path) -> dict[str, Any]:
    """See `models.drafts.Family`; ValueError for a draft of a part of the vocabulary, or with FSPAD."""
    config = _format.read(directory)
    require_whole_vocabulary(FAMILY, config["draft_vocab_size"], config["vocab_size"])
    _require_plain(tuple(name for name in OPTIONS if config.get(name)))
    return {"method": "eagle", "model": str(directory)}


def vllm_weights(directory: Path) -> EngineWeights:
    """Return the file; its tensors have vLLM's names behind "model."."""
    file, parameters = engine_weights(directory)
    return EngineWeights(file, {f"model.{name}": tensors for name, tensors in parameters.items()})


def _require_plain(chosen: tuple[str, ...]) -> None:
    if chosen:
        raise ValueError(
            f"vLLM's drafts of family {FAMILY} have no {' and no '.join(chosen)}: leave it out of [draft], or engine "
            '"torch"'
        )
