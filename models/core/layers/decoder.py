"""The forward pass of Llama-like models for one sequence, with a cache that can be cut back.

It exists because speculation needs what the library's cache does not give cheaply: read a tree of possible next tokens
in one pass, and after every step forget all of it but the path that was right. A step of one token takes little more
than its weights take to read, so the layers call few operations: stacked products, one rotation of queries and keys
together, and heads that share keys as rows of one attention.
"""

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.nn import functional
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from models.core.checkpoints.loading import LEFT, RIGHT, read_parts, stacked
from models.core.layers.kernels import Product, gated, product, rms_norm, rotated
from models.targets import MODEL_TYPES, target_config

CHUNK = 512


def require_known(config: Any) -> None:
    """Raise ValueError if a model of a configuration is not one that this forward pass knows."""
    if config.model_type not in MODEL_TYPES:
        raise ValueError(f"model_type is {config.model_type!r}; this forward pass knows {', '.join(MODEL_TYPES)}")
    kinds = set(getattr(config, "layer_types", None) or ())
    if "sliding_attention" in kinds or (config.model_type == "mistral" and config.sliding_window):
        raise ValueError("sliding-window attention is not one that this forward pass knows")
    if config.hidden_act != "silu":
        raise ValueError(f"hidden_act is {config.hidden_act!r}; wanted silu")


class Sublayers(NamedTuple):
    """Attention and MLP sublayers, by the numbers of their layers."""

    attention: frozenset[int]
    mlp: frozenset[int]


class Begun(NamedTuple):
    """What is known already of the first rows of a pass: layers that they have gone through, and [m, H] after these.

    The states are not normed; the cache holds the rows' keys and values of these layers.
    """

    num_layers: int
    states: Tensor


class Cache:
    """Keys and values of one sequence; `length` may be set back to forget its tail."""

    def __init__(self, decoder: "Decoder", max_len: int) -> None:
        shape = (decoder.num_layers, decoder.num_kv_heads, max_len, decoder.head_dim)
        self.keys, self.values = (torch.zeros(shape, dtype=decoder.dtype, device=decoder.device) for _ in range(2))
        self.length = 0

    @property
    def max_len(self) -> int:
        """Tokens that it can hold."""
        return self.keys.shape[2]

    def keep(self, start: int, rows: Sequence[int]) -> None:
        """Forget all rows of the last pass but those of one path, which close up; a chain's first ones stay in place.

        `start` is `length` before the pass; `rows`, the path, ascend from 0.
        """
        stop = start + len(rows)
        if rows and rows[-1] >= len(rows):
            places = torch.tensor(rows, device=self.keys.device) + start
            for held in (self.keys, self.values):
                held[:, :, start:stop] = held[:, :, places]
        self.length = stop


class Decoder:
    """Weights of a model and its forward pass.

    Letters: n tokens of a step, H hidden width, V vocabulary, A tapped layers.
    """

    def __init__(self, config: Any, tensors: dict[str, Tensor], dtype: torch.dtype, device: str = "cpu") -> None:
        """Take a model's tensors by the checkpoint's names; ValueError for another architecture or set of tensors."""
        require_known(config)
        self.dtype, self.device = dtype, device
        self.vocab_size, self.num_layers = config.vocab_size, config.num_hidden_layers
        self.num_heads, self.num_kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.eps = config.rms_norm_eps
        self._frequencies, self._rope_scale = rope_frequencies(config, self.head_dim)
        rest = {name: tensor.to(device=device, dtype=dtype) for name, tensor in tensors.items()}
        self._embedding = _take(rest, "model.embed_tokens.weight")
        self._norm = _take(rest, "model.norm.weight")
        if config.tie_word_embeddings:
            rest.pop("lm_head.weight", None)  # a copy that some files keep
        self._head = product(self._embedding if config.tie_word_embeddings else _take(rest, "lm_head.weight"))
        self._layers = [_Layer(rest, f"model.layers.{number}") for number in range(self.num_layers)]
        if rest:
            raise ValueError(f"tensor {min(rest)} is not one of a Llama-like model's")

    @classmethod
    def load(cls, directory: Path, dtype: torch.dtype, device: str = "cpu") -> Self:
        """Read a model directory; ValueError as the constructor."""
        return cls(target_config(directory), read_parts(directory), dtype, device)

    def forward(
        self,
        token_ids: Tensor,
        cache: Cache,
        taps: tuple[int, ...] = (),
        parents: Sequence[int] | None = None,
        begun: Begun | None = None,
        vectors: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Run tokens that follow what is in the cache, and add them to it.

        Args:
            token_ids: [n] int64.
            cache: of this sequence.
            taps: residual streams to return, counted as layers done.
            parents: the row, below its own, that each token follows, or counted back from -1 a token of the cache: it
                sees all on its path, and its position is the path's length. None is a chain.
            begun: layers that the first rows need not go through again.
            vectors: [m, H] rows behind the tokens' that are read as if they were embeddings; `parents` has one for each
                of them too.

        Returns:
            last hidden states [n, H], normed, and tapped ones [n, A·H], not normed, those of vectors behind the others.

        Raises:
            ValueError: the cache can't hold the rows, or a tap is one of the layers that rows have gone through.
        """
        if begun is not None and any(tap < begun.num_layers for tap in taps):
            raise ValueError(f"rows that begin after {begun.num_layers} layers have no states of layer {min(taps)}")
        parts, embedded = [], functional.embedding(token_ids, self._embedding)
        if vectors is not None:
            embedded = torch.cat([embedded, vectors.to(embedded)])
        chunk = CHUNK if begun is None else len(embedded)
        for read, rows in self._passes(embedded, cache, parents, chunk):
            state, first = read, 0
            if begun is not None:
                first, done = begun.num_layers, len(begun.states)
                state = torch.cat([begun.states, self._through(range(first), state[done:], cache, rows.after(done))])
            kept = {first: state}
            for number in range(first, self.num_layers):
                state = self._through(range(number, number + 1), state, cache, rows)
                if number + 1 in taps:
                    kept[number + 1] = state
            cache.length += len(read)
            tapped = torch.cat([kept[number] for number in taps], dim=-1) if taps else state[:, :0]
            parts.append((self._normed(state, self._norm), tapped))
        return _joined(parts)

    def partial(
        self, token_ids: Tensor, cache: Cache, skipped: Sublayers, parents: Sequence[int] | None = None
    ) -> tuple[Tensor, Begun]:
        """Run tokens as `forward` does, through some sublayers only; an attention that is skipped writes no keys.

        Returns:
            last hidden states [n, H], normed, and those after the layers before the first with a sublayer skipped.
        """
        whole = min(skipped.attention | skipped.mlp, default=self.num_layers)
        parts = []
        embedded = functional.embedding(token_ids, self._embedding)
        for read, rows in self._passes(embedded, cache, parents):
            begun = self._through(range(whole), read, cache, rows)
            state = self._through(range(whole, self.num_layers), begun, cache, rows, skipped)
            cache.length += len(read)
            parts.append((self._normed(state, self._norm), begun))
        states, begun = _joined(parts)
        return states, Begun(whole, begun)

    def embed(self, token_ids: Tensor) -> Tensor:
        """[n] int64 → [n, H], what the first layer reads."""
        return functional.embedding(token_ids, self._embedding)

    def run(self, layers: range, state: Tensor, cache: Cache, start: int) -> Tensor:
        """Run rows of a chain through some layers; their keys and values enter the cache, whose `length` stays.

        `state` [n, H] is what the first layer reads, from place `start`; rows before have gone through these layers.
        Returns [n, H], not normed; ValueError if the cache can't hold the rows.
        """
        if start + len(state) > cache.max_len:
            raise ValueError(f"{start} tokens and {len(state)} more; the cache holds {cache.max_len}")
        parts = []
        for read in state.split(CHUNK):
            parts.append(self._through(layers, read, cache, self._chain(start, len(read))))
            start += len(read)
        return torch.cat(parts)

    def said(self, state: Tensor) -> Tensor:
        """[n, H] not normed → [n, V] logits in float32, as if these layers were the last."""
        return self.logits(self._normed(state, self._norm))

    def logits(self, states: Tensor) -> Tensor:
        """[n, H] → [n, V] in float32."""
        return self._head(states).float()

    def _passes(
        self, embedded: Tensor, cache: Cache, parents: Sequence[int] | None, chunk: int = CHUNK
    ) -> Iterator[tuple[Tensor, "_Rows"]]:
        """Yield what is read [n, H] and its rows, of a chain so many at a time; who takes them lets the cache grow."""
        if cache.length + len(embedded) > cache.max_len:
            raise ValueError(f"{cache.length} tokens and {len(embedded)} more; the cache holds {cache.max_len}")
        if parents is not None and list(parents) != list(range(-1, len(embedded) - 1)):
            yield embedded, self._tree(cache, parents)
            return
        for read in embedded.split(chunk):
            yield read, self._chain(cache.length, len(read))

    def _chain(self, start: int, num_tokens: int) -> "_Rows":
        stop = start + num_tokens
        positions = torch.arange(start, stop, dtype=torch.float32, device=self.device)
        mask = None
        if num_tokens > 1:
            mask = torch.full((num_tokens, stop), float("-inf"), dtype=self.dtype, device=self.device)
            mask = mask.triu(start + 1)
        return self._rows(start, stop, positions, mask)

    def _tree(self, cache: Cache, parents: Sequence[int]) -> "_Rows":
        num_rows, length = len(parents), cache.length
        above = torch.eye(num_rows, dtype=torch.bool)
        known: list[int] = []  # tokens of the cache that each row sees
        for row, parent in enumerate(parents):
            if parent >= 0:
                above[row] |= above[parent]
            known.append(known[parent] if parent >= 0 else length + 1 + parent)
        if min(known) < 0:
            raise ValueError(f"a row follows token {min(known) - 1}; the cache holds {length} from 0")
        before = torch.tensor(known)
        seen = torch.cat([torch.arange(length) < before[:, None], above], dim=1)
        mask = torch.zeros(num_rows, length + num_rows, dtype=self.dtype).masked_fill_(~seen, float("-inf"))
        positions = before + above.sum(dim=1) - 1
        return self._rows(length, length + num_rows, positions.float().to(self.device), mask.to(self.device))

    def _rows(self, start: int, stop: int, positions: Tensor, mask: Tensor | None) -> "_Rows":
        """`mask` [n, T] is added to scores, once for every head of a group."""
        group = self.num_heads // self.num_kv_heads
        return _Rows(start, stop, self._rotation(positions), None if mask is None else mask.repeat(group, 1), group)

    def _through(
        self, layers: range, state: Tensor, cache: Cache, rows: "_Rows", skipped: Sublayers | None = None
    ) -> Tensor:
        """Run [n, H] through some layers; their keys and values enter the cache, whose length stays as it is."""
        for number in layers:
            if skipped is None or number not in skipped.attention:
                state = state + self._attention(number, state, cache, rows)
            if skipped is None or number not in skipped.mlp:
                state = state + self._mlp(self._layers[number], state)
        return state

    def _attention(self, number: int, state: Tensor, cache: Cache, rows: "_Rows") -> Tensor:
        """[n, H] → [n, H], what the layer's attention adds; its keys and values enter the cache."""
        layer = self._layers[number]
        queries, keys, values = self._project(layer, state, rows.rotation)
        all_keys, all_values = cache.keys[number, :, : rows.stop], cache.values[number, :, : rows.stop]
        all_keys[:, rows.start :], all_values[:, rows.start :] = keys.transpose(0, 1), values.transpose(0, 1)
        return layer.output(self._attend(queries, all_keys, all_values, rows.mask))

    def _mlp(self, layer: "_Layer", state: Tensor) -> Tensor:
        """[n, H] → [n, H], what the layer's MLP adds."""
        return layer.down(gated(layer.gate_up(self._normed(state, layer.norm_after))))

    def _project(self, layer: "_Layer", state: Tensor, rotation: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries [n, heads, width], keys and values [n, kv heads, width]."""
        joined = layer.qkv(self._normed(state, layer.norm_before), layer.qkv_bias).view(len(state), -1, self.head_dim)
        turned, values = joined.split([self.num_heads + self.num_kv_heads, self.num_kv_heads], dim=1)
        if layer.query_norm is not None and layer.key_norm is not None:
            queries, keys = turned.split([self.num_heads, self.num_kv_heads], dim=1)
            turned = torch.cat([self._normed(queries, layer.query_norm), self._normed(keys, layer.key_norm)], dim=1)
        queries, keys = rotated(turned, rotation).split([self.num_heads, self.num_kv_heads], dim=1)
        return queries, keys, values

    def _attend(self, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        """[n, heads, width] against [kv heads, T, width] → [n, heads·width]; heads of a group are rows of one head."""
        num_tokens = len(queries)
        grouped = queries.transpose(0, 1).reshape(1, self.num_kv_heads, -1, self.head_dim)
        attended = functional.scaled_dot_product_attention(grouped, keys[None], values[None], attn_mask=mask)
        return attended.reshape(self.num_heads, num_tokens, -1).transpose(0, 1).reshape(num_tokens, -1)

    def _rotation(self, positions: Tensor) -> Tensor:
        angles = positions[:, None] * self._frequencies.to(self.device)
        return (torch.cat([angles.cos(), angles.sin()], -1) * self._rope_scale).to(self.dtype)

    def _normed(self, x: Tensor, gain: Tensor) -> Tensor:
        return rms_norm(x, gain, self.eps)


def rope_frequencies(config: Any, head_dim: int) -> tuple[Tensor, float]:
    """Return [width/2] radians a position, and the factor on both waves; ValueError for a scaling not known here."""
    rope = config.rope_parameters.get("rope_type", "default")
    with torch.device("cpu"):  # also where a caller makes modules without storage
        if rope == "default":
            theta = config.rope_parameters["rope_theta"]
            return theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim), 1.0
        if rope not in ROPE_INIT_FUNCTIONS or rope == "dynamic":
            raise ValueError(f"rope_type {rope!r} is not one that this forward pass knows")
        frequencies, scale = ROPE_INIT_FUNCTIONS[rope](config, torch.device("cpu"))
    return frequencies.float(), float(scale)


class _Rows(NamedTuple):
    """Where the rows of a pass stand: places of the cache, rotation [n, width], and what they see [G·n, stop]."""

    start: int
    stop: int
    rotation: Tensor
    mask: Tensor | None
    group: int

    def after(self, done: int) -> "_Rows":
        """Return all but the first rows, which the others still see."""
        mask = None if self.mask is None else self.mask.unflatten(0, (self.group, -1))[:, done:].flatten(0, 1)
        return self._replace(start=self.start + done, rotation=self.rotation[done:], mask=mask)


class _Layer:
    """One block's norms, and its products; those that read the same input are stacked into one."""

    def __init__(self, tensors: dict[str, Tensor], prefix: str) -> None:
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        self.norm_before = _take(tensors, f"{prefix}.input_layernorm.weight")
        self.norm_after = _take(tensors, f"{prefix}.post_attention_layernorm.weight")
        parts = [f"{attention}.{part}_proj" for part in "qkv"]
        self.qkv = _product(tensors, *parts)
        biased = f"{parts[0]}.bias" in tensors
        self.qkv_bias = torch.cat([_take(tensors, f"{part}.bias") for part in parts]) if biased else None
        self.output = _product(tensors, f"{attention}.o_proj")
        self.gate_up = _product(tensors, f"{mlp}.gate_proj", f"{mlp}.up_proj")
        self.down = _product(tensors, f"{mlp}.down_proj")
        self.query_norm = tensors.pop(f"{attention}.q_norm.weight", None)
        self.key_norm = tensors.pop(f"{attention}.k_norm.weight", None)


def _joined(parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    states, others = zip(*parts, strict=True)
    return (states[0], others[0]) if len(parts) == 1 else (torch.cat(states), torch.cat(others))


def _product(tensors: dict[str, Tensor], *layers: str) -> Product:
    if f"{layers[0]}.{LEFT}" in tensors:
        left, right = ([_take(tensors, f"{name}.{side}") for name in layers] for side in (LEFT, RIGHT))
        return stacked(left, right)
    return product(torch.cat([_take(tensors, f"{name}.weight") for name in layers]))


def _take(tensors: dict[str, Tensor], name: str) -> Tensor:
    if name not in tensors:
        raise ValueError(f"tensor {name} is missing")
    return tensors.pop(name)


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
