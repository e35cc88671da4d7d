"""The EAGLE-3 head: how it drafts, in training as in serving ("training-time test").

The state that it first reads is a product of several of the target's residual streams, and then its own output before
the final norm. Queries, keys and values are products of the normed embedding and the normed state side by side.

Heads that others trained may add the layer's output to the normed hidden state instead of the raw one
(`norm_before_residual`).
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from models.features import FeatureDraft, Scale, decoder_layer, linear


class Eagle3(FeatureDraft):
    """The head; parameters carry the names of the checkpoint."""

    d2t: Tensor

    def __init__(self, config: dict[str, Any], embedding: Tensor) -> None:
        super().__init__(config, embedding)
        hidden = config["hidden_size"]
        self.norm_before_residual = config.get("norm_before_residual", False)
        self.fc = linear(len(config["eagle_aux_hidden_state_layer_ids"]) * hidden, hidden)
        self.midlayer = decoder_layer(config, 2 * hidden, ("input_layernorm", "hidden_norm"))
        self.norm = Scale(hidden)
        self.lm_head = linear(hidden, config["draft_vocab_size"]).requires_grad_(False)
        self.register_buffer("d2t", torch.zeros(config["draft_vocab_size"], dtype=torch.int64), is_subset(config))

    @property
    def vocabulary(self) -> Tensor:
        """[D] target ids of the draft's tokens, ascending."""
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    @property
    def taps(self) -> tuple[int, ...]:
        """Which residual streams are read."""
        return tuple(self.config["eagle_aux_hidden_state_layer_ids"])

    @property
    def layer(self) -> Any:
        """See the base, as are the next four."""
        return self.midlayer

    def combine(self, hidden: Tensor) -> Tensor:
        """One product of all tapped states."""
        combined: Tensor = self.fc(hidden)
        return combined

    def join(self, state: Tensor, token_ids: Tensor) -> Tensor:
        """The embedding, then the state, each normed; J = 2 H."""
        embedded = functional.embedding(token_ids, self.embedding).to(state.dtype)
        return torch.cat(
            [self.normed(embedded, self.layer["input_layernorm"]), self.normed(state, self.layer["hidden_norm"])], -1
        )

    def residual(self, state: Tensor, joined: Tensor) -> Tensor:
        """The state."""
        return self.normed(state, self.layer["hidden_norm"]) if self.norm_before_residual else state

    def say(self, state: Tensor) -> tuple[Tensor, Tensor]:
        """A norm and an output matrix of its own, of the draft's tokens."""
        hidden = self.normed(state, self.norm)
        return hidden, self.lm_head(hidden)


def is_subset(config: dict[str, Any]) -> bool:
    """Whether a draft's vocabulary is a part of the target's, so that a map `d2t` tells which."""
    return bool(config["draft_vocab_size"] != config["vocab_size"])
