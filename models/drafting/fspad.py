"""FSPAD: two parts that a draft which goes on with features may have; `models.drafts.eagle` has them.

Feature sampling. What a feature leaves open, the token after it settles; its embedding e says in the width of an MLP
what of the two together is taken:

    s = g + W_down (SiLU(W_gate e) ⊙ W_up norm(g)),   g = W [e; f]

Partial alignment. A feature that is near the target's may say the wrong token, and one that says the right token may be
far from it. So the layer's MLP ends in two vectors, h + MLP(h)₁ and h + MLP(h)₂: the first is what tokens are said
from, and is trained by these alone; the second is aligned with the target's feature, and is what the next step reads.

Both add nothing to a new draft: W_down starts at 0, and the two vectors as one.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from models.checkpoints.checkpoint import read_tensor
from models.drafting.borrowing import NormedDraft
from models.drafting.features import Scale, linear

PAPER = "arXiv:2408.15562; github.com/Luc4Gui/FSPAD"
OPTIONS = ("feature_sampling", "partial_alignment")


class Sampler(nn.Module):
    """Feature sampling."""

    def __init__(self, width: int, inner: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.post_attention_layernorm = Scale(width)  # the name that its code gives it
        self.mlp = nn.ModuleDict(
            {
                "gate_proj": linear(width, inner),
                "up_proj": linear(width, inner),
                "down_proj": linear(inner, width),
            }
        )

    def forward(self, joined: Tensor, embedded: Tensor) -> Tensor:
        """[…, H] g and […, H] embeddings → […, H] s."""
        normed = functional.rms_norm(joined, joined.shape[-1:], self.post_attention_layernorm.weight, self.eps)
        gated = functional.silu(self.mlp["gate_proj"](embedded)) * self.mlp["up_proj"](normed)
        sampled: Tensor = joined + self.mlp["down_proj"](gated)
        return sampled


class FspadDraft(NormedDraft):
    """See the base; a family adds `layers`, and makes in `join` what `sampled` makes of `fed`.

    Between two steps it hands on what was said from and what is fed on, side by side, [n, 2 H], or only one where the
    two are the same.
    """

    layers: nn.ModuleList

    def __init__(self, config: dict[str, Any]) -> None:
        """See the base; `feature_sampling` and `partial_alignment` of the config are true, or not there.

        Raises:
            ValueError: one of these is something else.
        """
        super().__init__(config)
        for name in OPTIONS:
            if not isinstance(config.get(name, False), bool):
                raise ValueError(f"{name} must be true or false; got {config[name]!r}")
        self.partly = config.get("partial_alignment", False)
        width, inner = config["hidden_size"], config["intermediate_size"]
        self.sampler = Sampler(width, inner, self.eps) if config.get("feature_sampling", False) else None

    def widen(self, layer: Any) -> Any:
        """Let a new layer end in two vectors, if alignment is partial."""
        if self.partly:
            layer["mlp"]["down_proj"] = linear(self.config["intermediate_size"], 2 * self.config["hidden_size"])
        return layer

    def fed(self, state: Tensor) -> Tensor:
        """[…, H] features or […, 2 H] what a step handed on → […, H] the part that is fed on."""
        return state[..., -self.config["hidden_size"] :]

    def sampled(self, joined: Tensor, embedded: Tensor) -> Tensor:
        """[…, H] g and […, H] embeddings → […, H] s, g itself where features are not sampled."""
        return joined if self.sampler is None else self.sampler(joined, embedded)

    def feed_forward(self, layer: Any, residual: Tensor) -> Tensor:
        """Two vectors, if alignment is partial."""
        if not self.partly:
            return super().feed_forward(layer, residual)
        mlp, x = layer["mlp"], self.normed(residual, layer["post_attention_layernorm"])
        added: Tensor = mlp["down_proj"](functional.silu(mlp["gate_proj"](x)) * mlp["up_proj"](x))
        return torch.cat([residual, residual], dim=-1) + added

    def say(self, state: Tensor, step: int = 0) -> tuple[Tensor, Tensor]:
        """The one is aligned, the other says tokens."""
        return self.fed(state), super().say(state[..., : self.config["hidden_size"]], step)[1]

    @torch.no_grad()
    def start_as_last_layer(self, target_dir: Path) -> None:
        """Let the layer be the target's last, and the parts add nothing."""
        last = f"model.layers.{self.num_target_layers - 1}"
        for name, parameter in self.layers[0].named_parameters():
            stored = read_tensor(target_dir, f"{last}.{name}")
            parameter.copy_(stored if parameter.shape == stored.shape else torch.cat([stored, stored]))
        if self.sampler is not None:
            for name, parameter in self.sampler.named_parameters():
                parameter.copy_(read_tensor(target_dir, f"{last}.{name}"))
            for parameter in self.sampler.mlp["down_proj"].parameters():
                parameter.zero_()
