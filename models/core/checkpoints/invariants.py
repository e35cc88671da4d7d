"""What a stage promises of a target's weights to all that come after it: where zeroes stand, and the rank of layers.

Pruning promises zeroes, and so does a training regime that makes some. A promise stands in the config, under "redraft",
and so goes where the weights go. Training keeps the zeroes (`models.core.learning.training`), `PreservedStructure` puts
back what merging an adapter fills, and `require` reads off the weights what is left.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from models.core.checkpoints.sparsity import Pattern
from models.core.layers.linears import linears
from models.regimes import Regime

# Rounding a layer to bfloat16 takes it from its rank by half of this share of its norm at most.
_ROUNDING = 2.0**-8
_SHAPE = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")


class Promises(NamedTuple):
    """What a config says of its weights: layer to where its zeroes stand, and layer to its rank."""

    patterns: dict[str, Pattern]
    ranks: dict[str, int]


def note(model: PreTrainedModel, key: str, value: Any) -> None:
    """Keep something in the config, under "redraft", that a loader of plain models passes over."""
    model.config.redraft = {**getattr(model.config, "redraft", {}), key: value}


def note_zeroes(model: PreTrainedModel) -> None:
    """Promise the zeroes that layers of the decoder blocks have, beside what is promised of them already."""
    shares = {name: float((layer.weight == 0).float().mean()) for name, layer in linears(model)}
    found = {name: {"sparsity": min(share, 1 - 1e-6)} for name, share in shares.items() if share}
    note(model, "patterns", found | getattr(model.config, "redraft", {}).get("patterns", {}))


def keep_zeroes(before: PreTrainedModel, after: PreTrainedModel) -> None:
    """Promise the zeroes that a model of another shape has left of those that were promised before."""
    if noted(before.config).patterns:
        note_zeroes(after)


def noted(config: PretrainedConfig) -> Promises:
    """Read off a config what weights are said to be."""
    of_weights: Mapping[str, Any] = getattr(config, "redraft", {})
    patterns = {name: Pattern.model_validate(pattern) for name, pattern in of_weights.get("patterns", {}).items()}
    return Promises(patterns, dict(of_weights.get("ranks", {})))


def require_noted(before: PretrainedConfig, after: PretrainedConfig) -> None:
    """Raise ValueError naming a layer of which a config says nothing more that one before it promised.

    In a model of another shape the same names are other layers; whoever made it promises anew (`keep_zeroes`).
    """
    if any(getattr(before, key, None) != getattr(after, key, None) for key in _SHAPE):
        return
    was, now = noted(before), noted(after)
    for promised, left in ((was.patterns, now.patterns), (was.ranks, now.ranks)):
        if forgotten := sorted(promised.keys() - left.keys()):
            raise ValueError(f"what was promised of layer {forgotten[0]} is not noted any more, so nothing can keep it")


@torch.no_grad()
def require(model: PreTrainedModel) -> None:
    """Raise ValueError naming a layer whose weights are not what the config promises."""
    patterns, ranks = noted(model.config)
    for name, layer in _promised(model):
        if name in patterns and not patterns[name].holds(layer.weight):
            raise ValueError(f"layer {name} was pruned to {patterns[name]}, and is not any more")
        if name in ranks and _beyond(layer.weight, ranks[name]) > _ROUNDING:
            raise ValueError(f"layer {name} was cut to rank {ranks[name]}, and has a higher one now")


class PreservedStructure:
    """The promised zeroes and ranks of a model, to be put back into it."""

    def __init__(self, model: PreTrainedModel) -> None:
        patterns, self.ranks = noted(model.config)
        self.zeroes = {name: layer.weight == 0 for name, layer in _promised(model) if name in patterns}

    @torch.no_grad()
    def put_back(self, model: PreTrainedModel) -> None:
        """Zero what was zero, and cut layers to their rank, the nearest matrix that has it."""
        for name, layer in _promised(model):
            if name in self.zeroes:
                layer.weight.masked_fill_(self.zeroes[name], 0)
            if (rank := self.ranks.get(name)) is not None and _beyond(layer.weight, rank) > _ROUNDING:
                left, values, right = torch.linalg.svd(layer.weight.float(), full_matrices=False)
                layer.weight.copy_((left[:, :rank] * values[:rank]) @ right[:rank])


class Holding(Regime):
    """Trains a pruned model without filling its zeroes."""

    def start(self, model: PreTrainedModel, num_steps: int) -> None:
        patterns = noted(model.config).patterns
        weights = [layer.weight for name, layer in _promised(model) if name in patterns]
        self.held = [(weight, weight == 0) for weight in weights if weight.requires_grad]

    def after_backward(self, model: PreTrainedModel) -> None:
        for weight, zero in self.held:
            if weight.grad is not None:
                weight.grad.masked_fill_(zero, 0)

    @torch.no_grad()
    def finish(self, model: PreTrainedModel) -> None:
        """See the base; other regimes may have rounded the weights."""
        for weight, zero in self.held:
            weight.masked_fill_(zero, 0)


def _promised(model: PreTrainedModel) -> Iterator[tuple[str, nn.Linear]]:
    """Yield the layers of a model that was promised something; others need not be of Llama's layout."""
    yield from linears(model) if any(noted(model.config)) else ()


def _beyond(weight: Tensor, rank: int) -> float:
    values = torch.linalg.svdvals(weight.float())
    return float(values[rank:].norm() / values.norm().clamp(min=1e-30))
