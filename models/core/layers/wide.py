"""The forward pass of `models.core.layers.decoder` spread out: over sequences, or over layers that run side by side."""

from collections.abc import Collection, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from models.core.layers.decoder import Cache, Decoder


class WideDecoder(Decoder):
    """A decoder that reads its weights once for a token of each of several sequences, or runs layers in groups.

    Letters: B sequences, n tokens of one, H hidden width, I channels of an MLP.
    """

    def together(self, token_ids: Tensor, caches: Sequence[Cache], layers: Collection[int] | None = None) -> Tensor:
        """Run one token of each of B sequences, each after what its own cache holds; [B, H] last hidden states, normed.

        Layers that are not among `layers`, None for all, are passed by on the residual stream and write no keys, so who
        leaves one out for a token must leave it out for all that follow in that sequence. ValueError if there is not
        one cache a token, two are the same, or one is full.
        """
        if len(token_ids) != len(caches) or len({id(cache) for cache in caches}) < len(caches):
            raise ValueError(f"{len(token_ids)} tokens want as many caches, each its own; got {len(caches)}")
        if any(cache.length >= cache.max_len for cache in caches):
            raise ValueError(f"a cache of {max(cache.max_len for cache in caches)} tokens is full")
        state = functional.embedding(token_ids, self._embedding)
        places = [cache.length for cache in caches]
        rotation = self._rotation(torch.tensor(places, dtype=torch.float32, device=self.device))
        for number in range(self.num_layers) if layers is None else sorted(layers):
            layer = self._layers[number]
            queries, keys, values = self._project(layer, state, rotation)
            attended = []
            for row, (cache, place) in enumerate(zip(caches, places, strict=True)):
                cache.keys[number, :, place], cache.values[number, :, place] = keys[row], values[row]
                seen = cache.keys[number, :, : place + 1], cache.values[number, :, : place + 1]
                attended.append(self._attend(queries[row : row + 1], *seen, None))
            state = state + layer.output(torch.cat(attended))
            state = state + self._mlp(layer, state)
        for cache in caches:
            cache.length += 1
        return self._normed(state, self._norm)

    def grouped(self, token_ids: Tensor, cache: Cache, size: int) -> Tensor:
        """Run tokens as `forward` does, but let the attentions of `size` layers all read what the first one reads.

        Their outputs still enter the residual stream one after another, each before its layer's MLP. A group of 1 is
        `forward`; the last group may be smaller. Returns [n, H], normed; ValueError if the cache can't hold the tokens,
        or a group has no layer.
        """
        if size < 1:
            raise ValueError(f"size of a group of layers must be 1 or more, got {size}")
        parts = []
        for tokens, rows in self._passes(token_ids, cache, None):
            state = functional.embedding(tokens, self._embedding)
            for first in range(0, self.num_layers, size):
                group = range(first, min(first + size, self.num_layers))
                attended = [self._attention(number, state, cache, rows) for number in group]
                for number, added in zip(group, attended, strict=True):
                    state = state + added
                    state = state + self._mlp(self._layers[number], state)
            cache.length += len(tokens)
            parts.append(self._normed(state, self._norm))
        return torch.cat(parts)
