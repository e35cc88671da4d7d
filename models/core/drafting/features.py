"""Draft families of one decoder layer that goes on with features: EAGLE, and what came of it.

Index t reads a state of token t and the embedding of token t+1, and drafts token t+2. For the next token it reads its
own output instead, and token t+2. In unroll j the row of index t stands at RoPE position t+j, and it attends to the
first unroll's keys up to t and to its own rows of unrolls 1…j, never to other rows' later ones: so it drafts in
training as the engine drafts in serving.

Keys and values of the first unroll need no attention output, so prompt tokens cost one projection; everything else runs
on the rows that have a loss.

Letters beyond those of `models.drafts`: n rows of a pass, J width of what queries, keys and values are products of.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaConfig

from models.core.checkpoints.loading import read_tensor
from models.core.checkpoints.readout import input_embedding
from models.core.drafting.drafters import draft_chain
from models.core.drafting.proposal import Proposal
from models.core.layers.decoder import rope_frequencies
from models.core.layers.kernels import rms_norm, rotated
from models.drafts import Draft, Draw, GoOn, KeepRows, Rows, Unrolled
from models.targets import MODEL_TYPES
from models.trees import path_to


class LayeredDraft(Draft):
    """What drafts of decoder layers of Llama's kind share; parameters carry the names of the checkpoint.

    The target's embedding is borrowed: it is read, never trained and never saved.
    """

    expands = True
    embedding: Tensor
    frequencies: Tensor

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.config = config
        self.num_heads, self.num_kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.head_dim, self.eps = config["head_dim"], config["rms_norm_eps"]
        self.register_buffer("embedding", torch.empty(0), persistent=False)
        frequencies, self.rope_scale = rope_frequencies(LlamaConfig(**config), self.head_dim)
        self.register_buffer("frequencies", frequencies, persistent=False)

    def borrow(self, target_dir: Path) -> Self:
        self.embedding = input_embedding(target_dir)
        return self

    def rotated(self, projected: Tensor, num_heads: int, positions: Tensor) -> Tensor:
        """[..., heads·width], may be written to, at `positions` [...] (or over leading axes) → [..., heads, width]."""
        heads = projected.unflatten(-1, (num_heads, self.head_dim))
        angles = positions[..., None].float() * self.frequencies
        rotation = (torch.cat([angles.cos(), angles.sin()], dim=-1) * self.rope_scale).to(heads.dtype)
        return rotated(heads, rotation)

    def project(self, attention: Any, name: Literal["q", "k"], x: Tensor, positions: Tensor) -> Tensor:
        """[..., J] at `positions` [...] → queries or keys [..., heads, width], normed where the layer norms them."""
        num_heads = self.num_heads if name == "q" else self.num_kv_heads
        heads = attention[f"{name}_proj"](x)
        if f"{name}_norm" in attention:
            heads = self.normed(heads.unflatten(-1, (num_heads, self.head_dim)), attention[f"{name}_norm"]).flatten(-2)
        return self.rotated(heads, num_heads, positions)

    def attend(
        self,
        queries: Tensor,
        own: tuple[Tensor, Tensor],
        sequence: Tensor,
        index: Tensor,
        text: tuple[Tensor, Tensor],
        seen: Tensor | None = None,
    ) -> Tensor:
        """Attention of packed rows to their text and to what is their own: [n, S, heads·width].

        Args:
            queries: [n, S, heads, width] of each row; rows of one sequence are contiguous.
            own: keys and values [n, m, kv heads, width], all of which a row's queries see.
            sequence, index: [n] as in `Rows`.
            text: keys and values [B, T, kv heads, width].
            seen: [n, T] which of these a row sees; None for all up to its index.
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
        """Return what each row starts from [n, H], of the combined hidden states [B, T, H] in most families."""
        return combined[rows.sequence, rows.index]

    def noise(self, state: Tensor, rng: torch.Generator) -> Tensor:
        """Return the states that training reads in place of the true ones; the same, in most families."""
        return state

    def context(
        self, hidden: Tensor, token_ids: Tensor, start: int = 0, rng: torch.Generator | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the first unroll's combined states [B, T, H], keys and values [B, T, kv heads, width] of every token.

        `hidden` [B, T, A·H] are tapped states, `token_ids` [B, T] the token after each; `start` is the first one's
        position, `rng` of training's noise.
        """
        combined = self.combine(hidden)
        if rng is not None:
            combined = self.noise(combined, rng)
        positions = torch.arange(start, start + hidden.shape[1], device=hidden.device)
        keys, values = self.keys_values(self.join(combined, token_ids), positions)
        return combined, keys, values

    def unroll(self, rows: Rows, num_steps: int, keep: KeepRows | None = None) -> list[Unrolled]:
        num_steps = min(num_steps, self.max_depth or num_steps)
        combined, keys, values = self.context(
            rows.hidden, rows.token_ids[:, 1 : rows.hidden.shape[1] + 1], rng=rows.rng
        )
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

    def drafter(self, max_len: int) -> "FeatureDrafter":
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
        """
        joined = self.join(state, token_ids)
        if step > 0:
            own.append(self.keys_values(joined, index + step))
        queries = self.project(self.layer["self_attn"], "q", joined, index + step)
        none = keys.new_empty(len(queries), 0, *keys.shape[2:])
        own_keys, own_values = (torch.stack(one, dim=1) for one in zip(*own, strict=True)) if own else (none, none)
        attended = self.attend(queries[:, None], (own_keys, own_values), sequence, index, (keys, values))[:, 0]
        return self.feed_forward(self.layer, self.residual(state, joined) + self.layer["self_attn"]["o_proj"](attended))

    def keys_values(self, joined: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """[…, J] at `positions` […] → keys and values […, kv heads, width]."""
        attention = self.layer["self_attn"]
        keys = self.project(attention, "k", joined, positions)
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

    `norms` names those before the attention, which are the family's own; `head_norms` are of queries and keys. Where
    `attention_bias` of the config says so, products of the attention have biases; that of its output in Llama's alone.
    """
    hidden, inner, width = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * width, config["num_key_value_heads"] * width
    biased = bool(config.get("attention_bias"))
    sizes = (("q_proj", queries), ("k_proj", keys), ("v_proj", keys))
    reads = {name: linear(num_inputs, size, biased) for name, size in sizes}
    output = linear(queries, hidden, biased and config["model_type"] == "llama")
    of_heads = {name: Scale(width) for name in ("q_norm", "k_norm") if head_norms}
    mlp = {"gate_proj": linear(hidden, inner), "up_proj": linear(hidden, inner), "down_proj": linear(inner, hidden)}
    return nn.ModuleDict(
        {
            **{name: Scale(hidden) for name in (*norms, "post_attention_layernorm")},
            "self_attn": nn.ModuleDict({**reads, "o_proj": output, **of_heads}),
            "mlp": nn.ModuleDict(mlp),
        }
    )


def start_as(layer: nn.Module, target_dir: Path, number: int) -> None:
    """Let a layer start as one of the target's; norms of queries and keys stay as they are."""
    for name, parameter in layer.named_parameters():
        if not name.endswith(("q_norm.weight", "k_norm.weight")):
            parameter.copy_(read_tensor(target_dir, f"model.layers.{number}.{name}"))


def layer_config(source: Any) -> dict[str, Any]:
    """Return what config.json says of a layer that is shaped like those of `source`, a transformers configuration.

    What a family has no word for, such as RMSNorm, is as in Llama, and positions are rotated as there by default.
    """
    same = (
        *("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "rms_norm_eps"),
        *("max_position_embeddings", "vocab_size", "bos_token_id", "eos_token_id"),
    )
    usual = {
        "intermediate_size": 4 * source.hidden_size,
        "num_key_value_heads": source.num_attention_heads,
        "rms_norm_eps": 1e-6,
    }
    rotation = {"rope_type": "default", "rope_theta": 10000.0}
    return {
        "model_type": "llama",
        **{key: getattr(source, key, None) or usual.get(key) for key in same},
        "head_dim": getattr(source, "head_dim", None) or source.hidden_size // source.num_attention_heads,
        "num_hidden_layers": 1,
        "hidden_act": "silu",
        "rope_parameters": dict(source.rope_parameters) if source.model_type in MODEL_TYPES else rotation,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }


def linear(num_inputs: int, num_outputs: int, bias: bool = False) -> nn.Linear:
    """Return a layer whose values are not set."""
    layer: nn.Linear = nn.utils.skip_init(nn.Linear, num_inputs, num_outputs, bias=bias)
    return layer


class Node(NamedTuple):
    """What a draft came to after some tokens."""

    state: Tensor  # [H] or [S, H], what the next pass reads
    logits: Tensor  # [S, D] of what follows, S levels of nodes, one in most families
    own: Any  # keys and values of the tokens but the certain ones, as the family keeps them
    memory: Any = None  # what else goes from pass to pass


class PathDrafter(ABC):
    """See `models.drafts.Drafter`. What follows a node hangs on the tokens on its path, on its depth at least."""

    draft: Draft

    @abstractmethod
    def _after(self, paths: Sequence[tuple[int, ...]]) -> Tensor:
        """Return the logits [n, D] after some tokens, which follow the last certain one."""

    def propose(self, num_tokens: int, draw: Draw, go_on: GoOn | None = None) -> Proposal:
        num_tokens = min(num_tokens, self.draft.max_depth or num_tokens)
        device = self.draft.vocabulary.device
        return draft_chain(lambda path: self._after([tuple(path)])[0], num_tokens, draw, go_on, device)

    def expand(self, token_ids: Sequence[int], parents: Sequence[int], nodes: Sequence[int]) -> Tensor:
        """See `models.core.drafting.drafters.Expander`; nothing follows a node that is as deep as the draft can go."""
        paths, deepest = [path_to(node, token_ids, parents) for node in nodes], self.draft.max_depth
        rows = [row for row, path in enumerate(paths) if deepest is None or len(path) < deepest]
        vocabulary, shape = self.draft.vocabulary, (len(nodes), self.draft.config["vocab_size"])
        found = torch.full(shape, float("-inf"), device=vocabulary.device)
        if rows:
            places = torch.tensor(rows, device=found.device)[:, None], vocabulary
            found[places] = self._after([paths[row] for row in rows]).log_softmax(-1)
        return found


class NodeDrafter(PathDrafter):
    """See the base; a pass is made once for all that goes on from the same tokens.

    Attributes:
        per_pass: S, levels of nodes that a pass makes.
    """

    per_pass = 1

    def __init__(self, draft: Draft) -> None:
        self.draft = self._run_by = draft
        self._nodes: dict[tuple[int, ...], Node] = {}  # by the tokens after the last certain one

    def _after(self, paths: Sequence[tuple[int, ...]]) -> Tensor:
        """See the base; passes that were not yet made are, level by level."""
        if self._run_by is not self.draft:
            self._nodes, self._run_by = {}, self.draft
        size = self.per_pass
        beginnings = {path[:length] for path in paths for length in range(0, len(path) + 1, size)}
        for _, level in groupby(sorted(beginnings - self._nodes.keys(), key=len), key=len):
            self._run(list(level))
        return torch.stack([self._nodes[path[: len(path) // size * size]].logits[len(path) % size] for path in paths])

    @abstractmethod
    def _run(self, level: Sequence[tuple[int, ...]]) -> None:
        """Make the passes after beginnings of one length, whose own beginnings have been."""


class FeatureDrafter(NodeDrafter):
    """See the base; only the first unroll's keys and values outlive a step."""

    draft: FeatureDraft

    def __init__(self, draft: FeatureDraft, max_len: int) -> None:
        super().__init__(draft)
        shape = (1, max_len, draft.num_kv_heads, draft.head_dim)
        self._keys, self._values = (torch.empty(shape, device=draft.embedding.device) for _ in range(2))
        self._length = 0
        self._state = self._last = torch.empty(0)

    def extend(self, token_ids: Tensor, hidden: Tensor) -> None:
        start, stop = self._length, self._length + len(hidden)
        combined, keys, values = self.draft.context(hidden[None].float(), token_ids[None, 1:], start)
        self._keys[:, start:stop], self._values[:, start:stop] = keys, values
        self._state, self._last, self._length = combined[0, -1:], token_ids[-1:], stop
        self._nodes = {}

    def _run(self, level: Sequence[tuple[int, ...]]) -> None:
        state, last, own, depth = self._state, self._last, [], len(level[0])
        if depth:
            above = [self._nodes[path[:-1]] for path in level]
            state = torch.stack([node.state for node in above])
            last = torch.tensor([path[-1] for path in level], device=state.device)
            own = [stacked(pairs) for pairs in zip(*(node.own for node in above), strict=True)]
        index = torch.full_like(last, self._length - 1)
        keys, values = self._keys[:, : self._length], self._values[:, : self._length]
        state = self.draft.advance(depth, state, last, torch.zeros_like(last), index, keys, values, own)
        logits = self.draft.say(state, depth)[1]
        for row, path in enumerate(level):
            self._nodes[path] = Node(state[row], logits[row, None], [(k[row], v[row]) for k, v in own])


def stacked(pairs: Iterable[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Put keys and values of several rows above each other, along a new axis 0."""
    keys, values = zip(*pairs, strict=True)
    return torch.stack(keys), torch.stack(values)
