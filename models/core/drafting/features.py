"""Draft families of one decoder layer that goes on with features: EAGLE, and what came of it.

Index t reads a state of token t and the embedding of token t+1, and drafts token t+2. For the next token it reads its
own output instead, and token t+2. In unroll j the row of index t stands at RoPE position t+j, and it attends to the
first unroll's keys up to t and to its own rows of unrolls 1…j, never to other rows' later ones: so it drafts in
training as the engine drafts in serving.

Keys and values of the first unroll need no attention output, so prompt tokens cost one projection; everything else runs
on the rows that have a loss.

Letters beyond those of `models.drafts`: n rows of a pass, J width of what queries, keys and values are products of.
"""

from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaConfig

from models.core.checkpoints.checkpoint import read_tensor
from models.core.drafting.path_drafters import FeatureDrafter
from models.core.layers.decoder import rope_frequencies
from models.core.layers.kernels import rms_norm, rotated
from models.drafts import Draft, KeepRows, Rows, Unrolled


class LayeredDraft(Draft):
    """What drafts of decoder layers of Llama's kind share; parameters carry the names of the checkpoint.

    The target's embedding is borrowed: it is read, never trained and never saved.
    """

    expands = True
    embedding: Tensor
    frequencies: Tensor

    def __init__(self, config: dict[str, Any]) -> None:
        """Take what all of them need of a config.json."""
        super().__init__()
        self.config = config
        self.num_heads, self.num_kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.head_dim, self.eps = config["head_dim"], config["rms_norm_eps"]
        self.register_buffer("embedding", torch.empty(0), persistent=False)
        frequencies, self.rope_scale = rope_frequencies(LlamaConfig(**config), self.head_dim)
        self.register_buffer("frequencies", frequencies, persistent=False)

    def borrow(self, target_dir: Path) -> Self:
        self.embedding = read_tensor(target_dir, "model.embed_tokens.weight").float()
        return self

    def rotated(self, projected: Tensor, num_heads: int, positions: Tensor) -> Tensor:
        """[..., heads·width] at `positions` [...] (or broadcast over leading axes) → [..., heads, width].

        What is projected may be written to.
        """
        heads = projected.unflatten(-1, (num_heads, self.head_dim))
        angles = positions[..., None].float() * self.frequencies
        rotation = (torch.cat([angles.cos(), angles.sin()], dim=-1) * self.rope_scale).to(heads.dtype)
        return rotated(heads, rotation)

    def attend(
        self,
        queries: Tensor,
        own: tuple[Tensor, Tensor],
        sequence: Tensor,
        index: Tensor,
        text: tuple[Tensor, Tensor],
        seen: Tensor | None = None,
    ) -> Tensor:
        """Attention of packed rows to their text and to what is their own.

        Args:
            queries: [n, S, heads, width] of each row; rows of one sequence are contiguous.
            own: keys and values [n, m, kv heads, width], all of which a row's queries see.
            sequence, index: [n] as in `Rows`.
            text: keys and values [B, T, kv heads, width].
            seen: [n, T] which of these a row sees; None for all up to its index.

        Returns:
            [n, S, heads·width].
        """
        if len(queries) == 1:
            rows = slice(int(index[0]) + 1) if seen is None else seen[0]
            keys, values = (torch.cat([one[sequence[0]][rows], mine[0]]) for one, mine in zip(text, own, strict=True))
            return self._attend_one(queries[0], keys, values)[None]
        queries = queries.unflatten(2, (self.num_kv_heads, -1)) * self.head_dim**-0.5
        own_scores = torch.einsum("nskgw,nukw->nskgu", queries, own[0])
        parts: list[Tensor] = []
        start = 0
        for number, count in zip(
            *(t.tolist() for t in torch.unique_consecutive(sequence, return_counts=True)), strict=True
        ):
            here = slice(start, start := start + count)
            limit = int(index[here].max()) + 1 if seen is None else seen.shape[1]
            keys, values = (one[number, :limit] for one in text)
            unseen = torch.arange(limit, device=index.device) > index[here, None] if seen is None else ~seen[here]
            scores = torch.einsum("nskgw,tkw->nskgt", queries[here], keys)
            scores = scores.masked_fill(unseen[:, None, None, None], float("-inf"))
            weights = torch.cat([scores, own_scores[here]], dim=-1).float().softmax(-1).to(queries.dtype)
            parts.append(
                torch.einsum("nskgt,tkw->nskgw", weights[..., :limit], values)
                + torch.einsum("nskgu,nukw->nskgw", weights[..., limit:], own[1][here])
            )
        return (torch.cat(parts) if parts else queries).flatten(2)

    def _attend_one(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """[S, heads, width] of one row against [t, kv heads, width], all of which it sees → [S, heads·width]."""
        num_queries = len(queries)
        grouped = queries.unflatten(1, (self.num_kv_heads, -1)).permute(1, 0, 2, 3).flatten(1, 2)
        seen_keys, seen_values = keys.transpose(0, 1), values.transpose(0, 1)
        attended: Tensor = functional.scaled_dot_product_attention(grouped[None], seen_keys[None], seen_values[None])[0]
        by_query: Tensor = attended.unflatten(1, (num_queries, -1)).transpose(0, 1)
        return by_query.flatten(1)

    def feed_forward(self, layer: Any, residual: Tensor) -> Tensor:
        """[…, H] → […, H] with the output of a layer's MLP added, […, 2 H] of one that ends in two vectors."""
        mlp = layer["mlp"]
        x = self.normed(residual, layer["post_attention_layernorm"])
        added: Tensor = mlp["down_proj"](functional.silu(mlp["gate_proj"](x)) * mlp["up_proj"](x))
        return (residual if added.shape == residual.shape else torch.cat([residual, residual], dim=-1)) + added

    def normed(self, x: Tensor, scale: "Scale") -> Tensor:
        """RMSNorm over the last axis."""
        return rms_norm(x, scale.weight.to(x.dtype), self.eps)


class FeatureDraft(LayeredDraft):
    """The one layer."""

    layers: nn.ModuleList

    @property
    def layer(self) -> Any:
        """What `decoder_layer` made; a tree of modules, whose branches have no types of their own."""
        return self.layers[0]

    @abstractmethod
    def combine(self, hidden: Tensor) -> Tensor:
        """[…, A·H] tapped states → […, H] the state that the first unroll reads."""

    def join(self, state: Tensor, token_ids: Tensor) -> Tensor:
        """[…, H] states and […] the tokens after them → […, J]; the state alone, normed, where tokens are in it."""
        return self.normed(state, self.layer["input_layernorm"])

    def residual(self, state: Tensor, joined: Tensor) -> Tensor:
        """Return [n, H] what the attention's output is added to."""
        return state

    @abstractmethod
    def say(self, state: Tensor, step: int = 0) -> tuple[Tensor, Tensor]:
        """[n, H] the layer's output of a step → what is to be like the target's feature [n, H], and logits [n, D]."""

    def begin(self, rows: Rows, combined: Tensor) -> Tensor:
        """Return what each row starts from, [n, H] of the combined hidden states [B, T, H] in most families."""
        return combined[rows.sequence, rows.index]

    def noise(self, state: Tensor, rng: torch.Generator) -> Tensor:
        """Return the states that training reads in place of the true ones; the same, in most families."""
        return state

    def context(
        self, hidden: Tensor, token_ids: Tensor, start: int = 0, rng: torch.Generator | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """First unroll's inputs for every token.

        Returns combined hidden states [B, T, H], keys and values [B, T, kv heads, width], of tapped states [B, T,
        A·H] and the token [B, T] after each; `start` is the first one's position, `rng` of training's noise.
        """
        combined = self.combine(hidden)
        if rng is not None:
            combined = self.noise(combined, rng)
        positions = torch.arange(start, start + hidden.shape[1], device=hidden.device)
        keys, values = self.keys_values(self.join(combined, token_ids), positions)
        return combined, keys, values

    def unroll(self, rows: Rows, num_steps: int, keep: KeepRows | None = None) -> list[Unrolled]:
        num_steps = min(num_steps, self.max_depth or num_steps)
        following = rows.token_ids[:, 1 : rows.hidden.shape[1] + 1]
        combined, keys, values = self.context(rows.hidden, following, rng=rows.rng)
        running = torch.arange(len(rows.index), device=rows.index.device)
        state = self.begin(rows, combined)
        own: list[tuple[Tensor, Tensor]] = []
        drafted = []
        for step in range(num_steps):
            sequence, index = rows.sequence[running], rows.index[running]
            token_ids = rows.token_ids[sequence, index + 1 + step]
            state = self.advance(step, state, token_ids, sequence, index, keys, values, own)
            hidden, logits = self.say(state, step)
            drafted.append(Unrolled(running, logits, hidden))
            if step + 1 < num_steps:
                going = rows.index[running] >= 0 if keep is None else keep(step, running, logits)
                running, state = running[going], state[going]
                own = [(k[going], v[going]) for k, v in own]
        return drafted

    def drafter(self, max_len: int) -> FeatureDrafter:
        return FeatureDrafter(self, max_len)

    def advance(
        self,
        step: int,
        state: Tensor,
        token_ids: Tensor,
        sequence: Tensor,
        index: Tensor,
        keys: Tensor,
        values: Tensor,
        own: list[tuple[Tensor, Tensor]],
    ) -> Tensor:
        """Run the layer once for rows [n].

        Args:
            step: number of the unroll, from 0.
            state: [n, H] the first time the combined hidden states, then what this returned.
            token_ids: [n] the tokens after them.
            sequence, index: [n] as in `Rows`.
            keys, values: [B, T, kv heads, width] of the first unroll.
            own: keys and values of the rows' further unrolls; this one's are added.

        Returns:
            the next state [n, H].
        """
        joined = self.join(state, token_ids)
        if step > 0:
            own.append(self.keys_values(joined, index + step))
        queries = self.rotated(self.layer["self_attn"]["q_proj"](joined), self.num_heads, index + step)
        none = keys.new_empty(len(queries), 0, *keys.shape[2:])
        own_keys, own_values = (torch.stack(one, dim=1) for one in zip(*own, strict=True)) if own else (none, none)
        attended = self.attend(queries[:, None], (own_keys, own_values), sequence, index, (keys, values))[:, 0]
        return self.feed_forward(self.layer, self.residual(state, joined) + self.layer["self_attn"]["o_proj"](attended))

    def keys_values(self, joined: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """[…, J] at `positions` […] → keys and values […, kv heads, width]."""
        attention = self.layer["self_attn"]
        keys = self.rotated(attention["k_proj"](joined), self.num_kv_heads, positions)
        return keys, attention["v_proj"](joined).unflatten(-1, (self.num_kv_heads, self.head_dim))


class Scale(nn.Module):
    """The gain of an RMSNorm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))


def decoder_layer(
    config: dict[str, Any], num_inputs: int, norms: Sequence[str] = ("input_layernorm",), head_norms: bool = False
) -> nn.ModuleDict:
    """Make a layer of Llama's kind that reads J inputs, without values for its matrices.

    `norms` names those before the attention, which are the family's own; `head_norms` are of queries and keys.
    """
    hidden, inner, width = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * width, config["num_key_value_heads"] * width
    reads = {name: linear(num_inputs, size) for name, size in (("q_proj", queries), ("k_proj", keys), ("v_proj", keys))}
    of_heads = {name: Scale(width) for name in ("q_norm", "k_norm") if head_norms}
    mlp = {"gate_proj": linear(hidden, inner), "up_proj": linear(hidden, inner), "down_proj": linear(inner, hidden)}
    return nn.ModuleDict(
        {
            **{name: Scale(hidden) for name in (*norms, "post_attention_layernorm")},
            "self_attn": nn.ModuleDict({**reads, "o_proj": linear(queries, hidden), **of_heads}),
            "mlp": nn.ModuleDict(mlp),
        }
    )


def start_as(layer: nn.Module, target_dir: Path, number: int) -> None:
    """Let a layer start as one of the target's; norms of queries and keys stay as they are."""
    for name, parameter in layer.named_parameters():
        if not name.endswith(("q_norm.weight", "k_norm.weight")):
            parameter.copy_(read_tensor(target_dir, f"model.layers.{number}.{name}"))


def layer_config(source: Any) -> dict[str, Any]:
    """Return what config.json says of a layer that is shaped like those of `source`, a transformers configuration."""
    width = getattr(source, "head_dim", None) or source.hidden_size // source.num_attention_heads
    return {
        "model_type": "llama",
        "hidden_size": source.hidden_size,
        "intermediate_size": source.intermediate_size,
        "num_attention_heads": source.num_attention_heads,
        "num_key_value_heads": source.num_key_value_heads,
        "head_dim": width,
        "num_hidden_layers": 1,
        "hidden_act": "silu",
        "rms_norm_eps": source.rms_norm_eps,
        "rope_parameters": dict(source.rope_parameters),
        "max_position_embeddings": source.max_position_embeddings,
        "vocab_size": source.vocab_size,
        "bos_token_id": source.bos_token_id,
        "eos_token_id": source.eos_token_id,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }


def linear(num_inputs: int, num_outputs: int) -> nn.Linear:
    """Return a layer without a bias, whose values are not set."""
    layer: nn.Linear = nn.utils.skip_init(nn.Linear, num_inputs, num_outputs, bias=False)
    return layer
