"""What the target's own attention looks at, made anew from the residual stream that a layer reads.

Engines hand on no attention. Queries and keys of a layer follow from the stream before it with the layer's norm and two
of its matrices, which are borrowed, so nothing of the target is run again.

Letters: n tokens, H hidden width.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from models.core.checkpoints.loading import read_tensor, tensor_names

# […, heads·width], number of heads, positions […] → […, heads, width], turned.
Rotate = Callable[[Tensor, int, Tensor], Tensor]


class Watched(nn.Module):
    """Queries and keys of one layer of the target."""

    def __init__(self, tensors: dict[str, Tensor], num_heads: int, num_kv_heads: int, eps: float) -> None:
        """Take `gain`, and of both q and k `q_weight` and, where the target has them, `q_bias` and `q_norm`."""
        super().__init__()
        self.num_heads, self.num_kv_heads, self.eps = num_heads, num_kv_heads, eps
        for name in ("gain", *(f"{part}_{kind}" for part in "qk" for kind in ("weight", "bias", "norm"))):
            self.register_buffer(name, tensors[name].float() if name in tensors else None, persistent=False)

    def project(self, states: Tensor, positions: Tensor, rotate: Rotate) -> tuple[Tensor, Tensor]:
        """[…, n, H] before the layer, [n] → queries […, n, heads, width] and keys […, n, kv heads, width]."""
        normed = functional.rms_norm(states, states.shape[-1:], self.get_buffer("gain"), self.eps)
        return self._part("q", self.num_heads, normed, positions, rotate), self._part(
            "k", self.num_kv_heads, normed, positions, rotate
        )

    def _part(self, part: str, num_heads: int, normed: Tensor, positions: Tensor, rotate: Rotate) -> Tensor:
        bias, norm = self._buffers[f"{part}_bias"], self._buffers[f"{part}_norm"]
        projected = functional.linear(normed, self.get_buffer(f"{part}_weight"), bias)
        if norm is not None:
            heads = projected.unflatten(-1, (num_heads, -1))
            projected = functional.rms_norm(heads, norm.shape, norm, self.eps).flatten(-2)
        return rotate(projected, num_heads, positions)


def watch(target_dir: Path, layers: tuple[int, ...], num_heads: int, num_kv_heads: int, eps: float) -> nn.ModuleList:
    """Read what some layers of a target look with."""
    there = {name for file in target_dir.glob("*.safetensors") for name in tensor_names(file)}
    found = []
    for layer in layers:
        prefix = f"model.layers.{layer}"
        tensors = {"gain": read_tensor(target_dir, f"{prefix}.input_layernorm.weight")}
        for part in "qk":
            tensors[f"{part}_weight"] = read_tensor(target_dir, f"{prefix}.self_attn.{part}_proj.weight")
            for key, name in ((f"{part}_bias", f"{part}_proj.bias"), (f"{part}_norm", f"{part}_norm.weight")):
                if f"{prefix}.self_attn.{name}" in there:
                    tensors[key] = read_tensor(target_dir, f"{prefix}.self_attn.{name}")
        found.append(Watched(tensors, num_heads, num_kv_heads, eps))
    return nn.ModuleList(found)


def weights(queries: Tensor, keys: Tensor) -> Tensor:
    """Return how a text looks at itself, [heads, n, n] of queries [n, heads, width] and keys [n, kv heads, width]."""
    scores = _scores(queries, keys)
    later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
    return scores.masked_fill(later, float("-inf")).softmax(-1)


def entropy(attention: Tensor) -> Tensor:
    """Return [n] the entropy of each row of [heads, n, n], in nats, the mean over heads."""
    found: Tensor = -torch.special.xlogy(attention, attention).sum(-1).mean(0)
    return found


def looked_at(query: Tensor, keys: Tensor) -> Tensor:
    """Return [n] how a token's look [heads, width] is shared out among some others' keys, the mean over heads."""
    return _scores(query[None], keys)[:, 0].softmax(-1).mean(0)


def _scores(queries: Tensor, keys: Tensor) -> Tensor:
    """[n, heads, width] and [m, kv heads, width] → [heads, n, m]."""
    group = queries.shape[1] // keys.shape[1]
    grouped = queries.unflatten(1, (-1, group)) * queries.shape[-1] ** -0.5
    return torch.einsum("nkgw,mkw->kgnm", grouped, keys).flatten(0, 1)


def require_layers(layers: Any) -> tuple[int, ...]:
    """Return the streams that are watched, counted as layers done; ValueError if they don't ascend from 0."""
    numbers = isinstance(layers, list) and all(type(one) is int and one >= 0 for one in layers)
    if not numbers or not layers or layers != sorted(set(layers)):
        raise ValueError(f"middle_layers must be ascending numbers from 0; got {layers}")
    return tuple(layers)
