"""The EAGLE-3 head: how it drafts, in training as in serving.

Index t reads the target's hidden states of token t and the embedding of token t+1, and drafts token t+2. For the next
token it reads its own output instead, before the final norm, and token t+2. Two things the paper does not say, both
needed to draft in training as the engine drafts in serving ("training-time test"): in unroll j the row of index t
stands at RoPE position t+j, and it attends to the first unroll's keys up to t and to its own rows of unrolls 1…j, never
to other rows' later ones.

Keys and values of the first unroll need no attention output, so prompt tokens cost one projection; everything else runs
on the rows that have a loss.

Heads that others trained may add the layer's output to the normed hidden state instead of the raw one
(`norm_before_residual`).
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaConfig

from models.drafts import Draft, Draw, GoOn, KeepRows, Rows, Unrolled, confidence
from models.layers.decoder import rope_frequencies
from models.proposal import Proposal


class Eagle3(Draft):
    """The head; parameters carry the names of the checkpoint.

    The target's embedding is borrowed: it is read, never trained and never saved.
    """

    d2t: Tensor
    embedding: Tensor
    frequencies: Tensor
    midlayer: Any  # a tree of modules, whose branches have no types of their own

    def __init__(self, config: dict[str, Any], embedding: Tensor) -> None:
        super().__init__()
        self.config = config
        hidden, inner = config["hidden_size"], config["intermediate_size"]
        width = config["head_dim"]
        self.num_heads, self.num_kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.head_dim, self.eps = width, config["rms_norm_eps"]
        self.norm_before_residual = config.get("norm_before_residual", False)
        self.fc = _linear(len(config["eagle_aux_hidden_state_layer_ids"]) * hidden, hidden)
        self.midlayer = nn.ModuleDict(
            {
                "input_layernorm": _Scale(hidden),
                "hidden_norm": _Scale(hidden),
                "post_attention_layernorm": _Scale(hidden),
                "self_attn": nn.ModuleDict(
                    {
                        "q_proj": _linear(2 * hidden, self.num_heads * width),
                        "k_proj": _linear(2 * hidden, self.num_kv_heads * width),
                        "v_proj": _linear(2 * hidden, self.num_kv_heads * width),
                        "o_proj": _linear(self.num_heads * width, hidden),
                    }
                ),
                "mlp": nn.ModuleDict(
                    {
                        "gate_proj": _linear(hidden, inner),
                        "up_proj": _linear(hidden, inner),
                        "down_proj": _linear(inner, hidden),
                    }
                ),
            }
        )
        self.norm = _Scale(hidden)
        self.lm_head = _linear(hidden, config["draft_vocab_size"]).requires_grad_(False)
        self.register_buffer("d2t", torch.zeros(config["draft_vocab_size"], dtype=torch.int64), is_subset(config))
        self.register_buffer("embedding", embedding, persistent=False)
        frequencies, self.rope_scale = rope_frequencies(LlamaConfig(**config), width)
        self.register_buffer("frequencies", frequencies, persistent=False)

    @property
    def vocabulary(self) -> Tensor:
        """[D] target ids of the draft's tokens, ascending."""
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    @property
    def taps(self) -> tuple[int, ...]:
        """Which residual streams are read."""
        return tuple(self.config["eagle_aux_hidden_state_layer_ids"])

    def context(self, hidden: Tensor, token_ids: Tensor, start: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """First unroll's inputs for every token.

        Args:
            hidden: [B, T, A·H].
            token_ids: [B, T] the token after each.
            start: position of the first one.

        Returns:
            combined hidden states [B, T, H], keys and values [B, T, kv heads, width].
        """
        combined = self.fc(hidden)
        positions = torch.arange(start, start + hidden.shape[1], device=hidden.device)
        keys, values = self._keys_values(self._joined(combined, token_ids), positions)
        return combined, keys, values

    def unroll(self, rows: Rows, num_steps: int, keep: KeepRows | None = None) -> list[Unrolled]:
        """See `models.drafts.Draft`."""
        following = rows.token_ids[:, 1 : rows.hidden.shape[1] + 1]
        combined, keys, values = self.context(rows.hidden, following)
        running = torch.arange(len(rows.index), device=rows.index.device)
        state = combined[rows.sequence, rows.index]
        own: list[tuple[Tensor, Tensor]] = []
        drafted = []
        for step in range(num_steps):
            sequence, index = rows.sequence[running], rows.index[running]
            token_ids = rows.token_ids[sequence, index + 1 + step]
            state = self._advance(step, state, token_ids, sequence, index, keys, values, own)
            hidden = self._normed(state, self.norm)
            logits = self.lm_head(hidden)
            drafted.append(Unrolled(running, logits, hidden))
            if step + 1 < num_steps:
                going = rows.index[running] >= 0 if keep is None else keep(step, running, logits)
                running, state = running[going], state[going]
                own = [(k[going], v[going]) for k, v in own]
        return drafted

    def step(
        self,
        step: int,
        state: Tensor,
        token_ids: Tensor,
        sequence: Tensor,
        index: Tensor,
        keys: Tensor,
        values: Tensor,
        own: list[tuple[Tensor, Tensor]],
    ) -> tuple[Tensor, Tensor]:
        """Run the layer once for rows [n].

        Args:
            step: number of the unroll, from 0.
            state: [n, H] the first time the combined hidden states, then what this returned.
            token_ids: [n] the tokens after them.
            sequence, index: [n] as in `Rows`.
            keys, values: [B, T, kv heads, width] of the first unroll.
            own: keys and values of the rows' further unrolls; this one's are added.

        Returns:
            the next state [n, H] and logits [n, D].
        """
        state = self._advance(step, state, token_ids, sequence, index, keys, values, own)
        return state, self.lm_head(self._normed(state, self.norm))

    def drafter(self, max_len: int) -> "_Drafter":
        """See `models.drafts.Draft`."""
        return _Drafter(self, max_len)

    def _advance(
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
        """Return the next state [n, H]; see `step`."""
        joined = self._joined(state, token_ids)
        if step > 0:
            own.append(self._keys_values(joined, index + step))
        queries = self._rotated(self.midlayer["self_attn"]["q_proj"](joined), self.num_heads, index + step)
        attended = self._attend(queries, sequence, index, keys, values, own)
        residual = self._normed(state, self.midlayer["hidden_norm"]) if self.norm_before_residual else state
        return self._feed_forward(residual + self.midlayer["self_attn"]["o_proj"](attended))

    def _joined(self, hidden: Tensor, token_ids: Tensor) -> Tensor:
        embedded = functional.embedding(token_ids, self.embedding).to(hidden.dtype)
        layer = self.midlayer
        return torch.cat(
            [self._normed(embedded, layer["input_layernorm"]), self._normed(hidden, layer["hidden_norm"])], -1
        )

    def _keys_values(self, joined: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        attention = self.midlayer["self_attn"]
        keys = self._rotated(attention["k_proj"](joined), self.num_kv_heads, positions)
        return keys, attention["v_proj"](joined).unflatten(-1, (self.num_kv_heads, self.head_dim))

    def _rotated(self, projected: Tensor, num_heads: int, positions: Tensor) -> Tensor:
        """[..., heads·width] at `positions` [...] (or broadcast over leading axes) → [..., heads, width]."""
        heads = projected.unflatten(-1, (num_heads, self.head_dim))
        angles = positions[..., None].float() * self.frequencies
        cos, sin = ((wave[..., None, :] * self.rope_scale).to(heads.dtype) for wave in (angles.cos(), angles.sin()))
        first, second = heads.chunk(2, dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)

    def _attend(
        self,
        queries: Tensor,
        sequence: Tensor,
        index: Tensor,
        keys: Tensor,
        values: Tensor,
        own: list[tuple[Tensor, Tensor]],
    ) -> Tensor:
        """Attention of packed rows [N, heads, width] → [N, heads·width]; rows of one sequence are contiguous."""
        groups = self.num_heads // self.num_kv_heads
        queries = queries.unflatten(1, (self.num_kv_heads, groups)) * self.head_dim**-0.5
        own_scores = [torch.einsum("nkgw,nkw->nkg", queries, k)[..., None] for k, _ in own]
        parts: list[Tensor] = []
        for number, count in zip(
            *(t.tolist() for t in torch.unique_consecutive(sequence, return_counts=True)), strict=True
        ):
            start = sum(len(part) for part in parts)
            stop = start + count
            limit = int(index[start:stop].max()) + 1
            scores = torch.einsum("nkgw,tkw->nkgt", queries[start:stop], keys[number, :limit])
            unseen = torch.arange(limit, device=index.device) > index[start:stop, None]
            scores = scores.masked_fill(unseen[:, None, None, :], float("-inf"))
            weights = (
                torch.cat([scores, *(s[start:stop] for s in own_scores)], dim=-1).float().softmax(-1).to(queries.dtype)
            )
            out = torch.einsum("nkgt,tkw->nkgw", weights[..., :limit], values[number, :limit])
            for step, (_, v) in enumerate(own):
                out = out + weights[..., limit + step, None] * v[start:stop, :, None, :]
            parts.append(out.flatten(1))
        return torch.cat(parts) if parts else queries.flatten(1)

    def _feed_forward(self, residual: Tensor) -> Tensor:
        mlp = self.midlayer["mlp"]
        x = self._normed(residual, self.midlayer["post_attention_layernorm"])
        added: Tensor = mlp["down_proj"](functional.silu(mlp["gate_proj"](x)) * mlp["up_proj"](x))
        return residual + added

    def _normed(self, x: Tensor, scale: "_Scale") -> Tensor:
        return functional.rms_norm(x, x.shape[-1:], scale.weight.to(x.dtype), self.eps)


class _Drafter:
    """See `models.drafts.Drafter`. Only the first unroll's keys and values outlive a step."""

    def __init__(self, draft: Eagle3, max_len: int) -> None:
        self.draft = draft
        shape = (1, max_len, draft.num_kv_heads, draft.head_dim)
        self._keys, self._values = (torch.empty(shape, device=draft.d2t.device) for _ in range(2))
        self._length = 0
        self._state = self._last = torch.empty(0)

    def extend(self, token_ids: Tensor, hidden: Tensor) -> None:
        """See the base."""
        start, stop = self._length, self._length + len(hidden)
        combined, keys, values = self.draft.context(hidden[None].float(), token_ids[None, 1:], start)
        self._keys[:, start:stop], self._values[:, start:stop] = keys, values
        self._state, self._last, self._length = combined[0, -1:], token_ids[-1:], stop

    def propose(self, num_tokens: int, draw: Draw, go_on: GoOn | None = None) -> Proposal:
        """See the base."""
        state, last = self._state, self._last
        sequence, index = torch.zeros_like(last), torch.full_like(last, self._length - 1)
        keys, values = self._keys[:, : self._length], self._values[:, : self._length]
        own: list[tuple[Tensor, Tensor]] = []
        proposed, drawn_from = [], []
        for step in range(num_tokens):
            state, logits = self.draft.step(step, state, last, sequence, index, keys, values, own)
            token, q = draw(logits[0])
            last = torch.full_like(last, token)
            proposed.append(token)
            drawn_from.append(q)
            if step + 1 < num_tokens and go_on is not None and not go_on(confidence(logits[0])):
                break
        return Proposal.chain(proposed, drawn_from, last.device)


class _Scale(nn.Module):
    """The gain of an RMSNorm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))


def _linear(inputs: int, outputs: int) -> nn.Linear:
    linear: nn.Linear = nn.utils.skip_init(nn.Linear, inputs, outputs, bias=False)
    return linear


def is_subset(config: dict[str, Any]) -> bool:
    """Whether a draft's vocabulary is a part of the target's, so that a map `d2t` tells which."""
    return bool(config["draft_vocab_size"] != config["vocab_size"])
