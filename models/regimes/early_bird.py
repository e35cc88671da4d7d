"""Early-bird tickets: the structure worth keeping shows early, so training looks for it and drops the rest at once.

Each MLP channel and each attention head gets a coefficient c, 1 at first, by which its output is multiplied; the loss
gains `penalty` · Σ|c|. After each epoch a mask of the largest |c| is drawn. When the largest Hamming distance between
the mask and those of the last `window` epochs, as a share of the mask, is under `epsilon`, the ticket is found:
training stops, or goes on with the ticket alone. In the end the coefficients are multiplied into the weights, and
the ticket's zeroes are noted as promised (`models.core.checkpoints.invariants`).

The control comes as a setting: `ticket` "random" keeps as many channels and heads of each layer, from the same epoch
on, and draws which.

What readers of the paper would not expect: it prunes channels of convolutions by the scales of batch norms, which a
language model lacks; coefficients of heads and channels stand in for them (EarlyBERT, arXiv:2101.00063), channels and
heads being ranked each among themselves over all layers, and each layer keeps its best one. Dropped parts are zero but
not cut out: the plain model has its old shape and the steps their old cost, and `flops_share` says what training would
have taken cut to the ticket.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from transformers import PreTrainedModel

from models.core.layers.linears import blocks
from models.params import BaseParams
from models.regimes import Batch, Regime

PAPER = "arXiv:1909.11957, section 3, algorithm 1"
CHANGES = ("products", "weights", "end", "frozen weights")
KEEPS = ("zeroes",)


class Params(BaseParams):
    """How the ticket is looked for, and what becomes of it."""

    name: Literal["early_bird"] = "early_bird"
    pruned_share: float = Field(0.3, gt=0, lt=1, description="of channels, and of heads, that the ticket lacks.")
    epsilon: float = Field(
        0.1, gt=0, lt=1, description="Hamming distance, as a share of the mask, under which masks are the same."
    )
    window: int = Field(5, ge=1, description="how many earlier epochs' masks must agree.")
    penalty: float = Field(1e-4, ge=0, description="of the coefficients' absolute values.")
    ticket: Literal["largest", "random"] = Field(
        "largest", description="the parts with the largest coefficients, or the control."
    )
    then: Literal["train", "stop"] = Field(
        "train", description='"train" trains the ticket for the remaining epochs, "stop" ends training there.'
    )


# Eight short epochs are too few for five masks to agree with the next: the first ones are still far apart.
COMPARED = {
    "window_2": Params(window=2),
    "window_2_epsilon_0.2": Params(window=2, epsilon=0.2),
    "window_2_epsilon_0.2_random_mask": Params(window=2, epsilon=0.2, ticket="random"),
}


CORNERS = (Params(window=1, epsilon=0.99), Params(window=1, epsilon=0.99, ticket="random", then="stop"))


def draw(coefficients: Sequence[Tensor], pruned_share: float) -> list[Tensor]:
    """Return which parts are kept, a bool each, of each layer's coefficients [C]; its largest stays in any case.
    `pruned_share` is of all layers' parts together."""
    sizes = torch.cat([layer.detach().abs() for layer in coefficients])
    kept = torch.ones(len(sizes), dtype=torch.bool, device=sizes.device)
    kept[sizes.argsort()[: int(pruned_share * len(sizes))]] = False
    masks = list(kept.split([len(layer) for layer in coefficients]))
    for layer, mask in zip(coefficients, masks, strict=True):
        mask[layer.detach().abs().argmax()] = True
    return masks


def distance(one: str, other: str) -> float:
    """Return the Hamming distance of two masks, strings of 0 and 1, as a share of their length."""
    return sum(a != b for a, b in zip(one, other, strict=True)) / len(one)


class Hooks(Regime):
    """`rng` draws the control. Refuses a model that is not of Llama's layout."""

    KEPT = ("recent", "ticket", "epoch", "num_steps", "num_ticket_steps")
    params: Params

    def __init__(self, params: Params, rng: torch.Generator) -> None:
        super().__init__(params, rng)
        self.recent: list[str] = []  # masks of the last epochs, the newest last
        self.ticket: str | None = None
        self.epoch = self.num_steps = self.num_ticket_steps = 0

    def start(self, model: PreTrainedModel, num_steps: int) -> list[nn.Parameter]:
        layers = blocks(model)
        self.head_dim = layers[0].self_attn.head_dim
        num_heads, device = model.config.num_attention_heads, model.device
        self.heads = [nn.Parameter(torch.ones(num_heads, device=device)) for _ in layers]
        self.channels = [nn.Parameter(torch.ones(one.mlp.down_proj.in_features, device=device)) for one in layers]
        self.handles = [
            hook
            for layer, head, channel in zip(layers, self.heads, self.channels, strict=True)
            for hook in (
                layer.self_attn.o_proj.register_forward_pre_hook(
                    lambda module, args, head=head: (args[0] * head.repeat_interleave(self.head_dim).to(args[0].dtype),)
                ),
                layer.mlp.down_proj.register_forward_pre_hook(
                    lambda module, args, channel=channel: (args[0] * channel.to(args[0].dtype),)
                ),
            )
        ]
        return [*self.heads, *self.channels]

    def penalty(self, model: PreTrainedModel, batch: Batch) -> Tensor | None:
        return self.params.penalty * torch.cat([*self.heads, *self.channels]).abs().sum()

    @torch.no_grad()
    def after_step(self, model: PreTrainedModel) -> None:
        self.num_steps += 1
        if self.ticket is not None:
            self.num_ticket_steps += 1
            self._apply()

    @torch.no_grad()
    def after_epoch(self, model: PreTrainedModel, epoch: int) -> bool:
        if self.ticket is not None:
            return False
        masks = draw(self.heads, self.params.pruned_share) + draw(self.channels, self.params.pruned_share)
        mask = _write(masks)
        far = max((distance(mask, other) for other in self.recent), default=1.0)
        full = len(self.recent) == self.params.window
        self.recent = [*self.recent, mask][-self.params.window :]
        if not full or far >= self.params.epsilon:
            return False
        random = self.params.ticket == "random"
        self.ticket, self.epoch = _write([_permute(one, self.rng) for one in masks]) if random else mask, epoch
        self._apply()
        return self.params.then == "stop"

    @torch.no_grad()
    def finish(self, model: PreTrainedModel) -> None:
        super().finish(model)
        self.share = self._weights_left(model)
        for layer, heads, channels in zip(blocks(model), self.heads, self.channels, strict=True):
            by_channel = heads.repeat_interleave(self.head_dim)
            layer.self_attn.o_proj.weight.mul_(by_channel)
            layer.mlp.down_proj.weight.mul_(channels)
            # What reads or feeds a part that is gone goes too, so that it can be cut out.
            for linear, kept in (
                (layer.self_attn.q_proj, by_channel != 0),
                (layer.mlp.gate_proj, channels != 0),
                (layer.mlp.up_proj, channels != 0),
            ):
                linear.weight.mul_(kept[:, None])
                if linear.bias is not None:
                    linear.bias.mul_(kept)

    def figures(self) -> dict[str, float]:
        if self.ticket is None:
            return {"flops_share": 1.0}
        saved = (1 - self.share) * self.num_ticket_steps / self.num_steps
        return {"ticket_epoch": float(self.epoch), "flops_share": 1 - saved}

    def _apply(self) -> None:
        bits = torch.tensor([bit == "1" for bit in self.ticket or ""], device=self.heads[0].device)
        parts = [*self.heads, *self.channels]
        for part, kept in zip(parts, bits.split([len(part) for part in parts]), strict=True):
            part.mul_(kept)

    def _weights_left(self, model: PreTrainedModel) -> float:
        """Return the share of the weights in products, output matrix included, that the ticket has."""
        total: int = model.lm_head.weight.numel()
        gone = 0
        for layer, heads, channels in zip(blocks(model), self.heads, self.channels, strict=True):
            linears = [module for module in layer.modules() if isinstance(module, nn.Linear)]
            total += sum(linear.weight.numel() for linear in linears)
            gone += int((channels == 0).sum()) * 3 * model.config.hidden_size
            gone += int((heads == 0).sum()) * 2 * self.head_dim * model.config.hidden_size
        return 1 - gone / total


def _permute(mask: Tensor, rng: torch.Generator) -> Tensor:
    return mask[torch.randperm(len(mask), generator=rng).to(mask.device)]


def _write(masks: list[Tensor]) -> str:
    return "".join("1" if bit else "0" for bit in torch.cat(masks).tolist())
