"""EAGLE-3: one decoder layer that drafts from the target's own hidden states.

Index t reads the target's hidden states of token t and the embedding of token t+1, and drafts token t+2. For the next
token it reads its own output instead, before the final norm, and token t+2. Two things the paper does not say, both
needed to draft in training as the engine drafts in serving ("training-time test"): in unroll j the row of index t
stands at RoPE position t+j, and it attends to the first unroll's keys up to t and to its own rows of unrolls 1…j, never
to other rows' later ones.

Keys and values of the first unroll need no attention output, so prompt tokens cost one projection; everything else runs
on the rows that have a loss.

The draft vocabulary is a subset of the target's. `d2t[i]` is the target's id of draft token i, minus i; a head that can
say every token has none, because the engine makes no room for it.

Heads that others trained may add the layer's output to the normed hidden state instead of the raw one
(`norm_before_residual`).
"""

import json
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoConfig, LlamaConfig

from models.checkpoint import output_embedding, read_tensor, read_tensors
from models.drafts import (
    Draft,
    KeepRows,
    Pick,
    Rows,
    Shapes,
    check_config,
    made_for,
    read_config,
    read_json,
    require_tensors,
)
from models.layers.decoder import rope_frequencies
from models.layers.vocabulary import choose_vocabulary
from models.layouts import read_published
from models.params import BaseParams
from models.targets import TargetCard, describe

PAPER = "arXiv:2503.01840"
TRAINED = True
WEIGHTS = "model.safetensors"
ARCHITECTURES = ("LlamaForCausalLMEagle3",)


class Params(BaseParams):
    """Shape of a new head.

    Attributes:
        vocab_size: D, at most the target's.
        aux_layers: which residual streams are read, counted as layers done; by default a third, two thirds and all of
            them.
    """

    name: Literal["eagle3"] = "eagle3"
    vocab_size: int = 4096
    aux_layers: tuple[int, ...] | None = None


class Eagle3(Draft):
    """The head; parameters carry the names of the checkpoint.

    The target's embedding is borrowed: it is read, never trained and never saved.
    """

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
        self.register_buffer("d2t", torch.zeros(config["draft_vocab_size"], dtype=torch.int64), _is_subset(config))
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

    def unroll(self, rows: Rows, num_steps: int, keep: KeepRows | None = None) -> list[tuple[Tensor, Tensor]]:
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
            state, logits = self.step(step, state, token_ids, sequence, index, keys, values, own)
            drafted.append((running, logits))
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
        joined = self._joined(state, token_ids)
        if step > 0:
            own.append(self._keys_values(joined, index + step))
        queries = self._rotated(self.midlayer["self_attn"]["q_proj"](joined), self.num_heads, index + step)
        attended = self._attend(queries, sequence, index, keys, values, own)
        residual = self._normed(state, self.midlayer["hidden_norm"]) if self.norm_before_residual else state
        state = self._feed_forward(residual + self.midlayer["self_attn"]["o_proj"](attended))
        return state, self.lm_head(self._normed(state, self.norm))

    def drafter(self, max_len: int) -> "_Drafter":
        """See `models.drafts.Draft`."""
        return _Drafter(self, max_len)

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
        parts = []
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
        return residual + mlp["down_proj"](functional.silu(mlp["gate_proj"](x)) * mlp["up_proj"](x))

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

    def propose(self, num_tokens: int, pick: Pick) -> tuple[list[int], Tensor]:
        """See the base."""
        state, last, vocabulary = self._state, self._last, self.draft.vocabulary
        sequence, index = torch.zeros_like(last), torch.full_like(last, self._length - 1)
        keys, values = self._keys[:, : self._length], self._values[:, : self._length]
        own: list[tuple[Tensor, Tensor]] = []
        proposed, logits = [], []
        for step in range(num_tokens):
            state, row = self.draft.step(step, state, last, sequence, index, keys, values, own)
            last = vocabulary[pick(row[0])][None]
            proposed.append(int(last))
            logits.append(row)
        return proposed, torch.cat(logits)


class _Scale(nn.Module):
    """The gain of an RMSNorm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))


def _linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.utils.skip_init(nn.Linear, inputs, outputs, bias=False)


def create(params: Params, target_dir: Path, token_counts: np.ndarray) -> Eagle3:
    """Make a head that starts from the target's last layer.

    Its hidden-state half of the attention and its MLP are the target's, the embedding half is zero, and `fc` passes the
    deepest tapped layer through, so an untrained head already drafts better than chance.

    Args:
        params: the head's shape.
        target_dir: the target's directory (Llama layout).
        token_counts: [V] how often each target token occurs in the traffic.

    Raises:
        ValueError: the target is not of the Llama layout, or `params` don't fit it.
    """
    source = AutoConfig.from_pretrained(target_dir)
    if source.model_type not in ("llama", "qwen2", "qwen3", "mistral"):
        raise ValueError(f"eagle3 reads targets of the Llama layout; got model_type {source.model_type!r}")
    if not 1 <= params.vocab_size <= source.vocab_size:
        raise ValueError(f"draft vocab_size must be 1 to {source.vocab_size}, the target's; got {params.vocab_size}")
    layers = params.aux_layers or _default_layers(source.num_hidden_layers)
    if list(layers) != sorted(set(layers)) or not 0 <= layers[0] <= layers[-1] <= source.num_hidden_layers:
        raise ValueError(f"aux_layers must ascend within 0 to {source.num_hidden_layers}; got {list(layers)}")
    card = describe(target_dir)
    config = _config(source, params.vocab_size, layers, card)
    head = Eagle3(config, read_tensor(target_dir, "model.embed_tokens.weight").float())
    _start_from_last_layer(head, target_dir, source.num_hidden_layers - 1)
    _set_vocabulary(head, target_dir, choose_vocabulary(token_counts, params.vocab_size))
    return head


def renew(head: Eagle3, target_dir: Path, token_counts: np.ndarray) -> Eagle3:
    """Let the draft vocabulary follow the traffic within its size; new tokens' rows start from the target's head."""
    wanted = choose_vocabulary(token_counts, len(head.d2t))
    known = {int(token): row for row, token in enumerate(head.vocabulary)}
    before = head.lm_head.weight.detach().clone()
    _set_vocabulary(head, target_dir, wanted)
    with torch.no_grad():
        for row, token in enumerate(wanted.tolist()):
            if token in known:
                head.lm_head.weight[row] = before[known[token]]
    return head


def save(head: Eagle3, directory: Path) -> None:
    """Write config.json and bfloat16 safetensors into `directory`, as the engine loads them."""
    tensors = {
        name: tensor.detach().to(torch.bfloat16 if tensor.is_floating_point() else tensor.dtype).contiguous().cpu()
        for name, tensor in head.state_dict().items()
    }
    save_file(tensors, directory / WEIGHTS, metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(head.config, indent=2, sort_keys=True) + "\n")


def load(directory: Path, target_dir: Path) -> Eagle3:
    """Read a head back, in float32, with the target's embedding beside it.

    Raises:
        ValueError: as `check`.
    """
    check(directory, like=None, target=describe(target_dir))
    config = read_config(directory, ARCHITECTURES)
    head = Eagle3(config, read_tensor(target_dir, "model.embed_tokens.weight").float())
    head.load_state_dict(load_file(directory / WEIGHTS))
    return head.float()


def check(directory: Path, like: Path | None, target: TargetCard) -> None:
    """Say all that can be said against a draft before an engine reads it.

    Args:
        directory: the draft.
        like: a draft that is served; shapes must equal its, because they can't change in a swap.
        target: the target that is served.

    Raises:
        ValueError: a file that can't be read; a tensor missing, extra, of another shape or dtype, or not finite; a
            vocabulary map that points outside the target's; a draft that was made for another target or tokenizer.
    """
    config = read_config(directory, ARCHITECTURES)
    for key, served in (("vocab_size", target.vocab_size), ("hidden_size", target.hidden_size)):
        if config[key] != served:
            raise ValueError(f"draft {directory.name} has {key} {config[key]}, the target has {served}")
    check_config(config, directory, None if like is None else read_config(like, ARCHITECTURES), target)
    _require_fit(read_tensors(directory), config)


def adopt(directory: Path, target_dir: Path) -> Eagle3:
    """Take a head that somebody else trained, in a layout of `models.layouts`.

    Args:
        directory: config.json and safetensors files; a tokenizer.json beside them must have the target's tokens.
        target_dir: the target that it is to draft for.

    Raises:
        ValueError: the head was made for another target as far as its files tell, is of a shape that is not supported,
            or a tensor is missing, extra, of another shape or not finite; names what does not fit.
    """
    if not directory.is_dir():
        raise ValueError(f"{directory} is not a directory")
    if not list(directory.glob("*.safetensors")) and (pickled := sorted(directory.glob("*.bin"))):
        raise ValueError(f"{pickled[0]} is a pickle, which could run code; wanted safetensors files")
    published = read_json(directory / "config.json")
    target, source = describe(target_dir), AutoConfig.from_pretrained(target_dir)
    check_config(published, directory, None, target)
    head = read_published(published, read_tensors(directory), target.num_layers)
    for key, wanted in (("hidden_size", target.hidden_size), ("vocab_size", target.vocab_size)):
        if (got := getattr(head.layer, key)) != wanted:
            raise ValueError(f"the head has {key} {got}, the target has {wanted}")
    _require_same_tokens(directory, target_dir)
    embedding = read_tensor(target_dir, "model.embed_tokens.weight")
    own = head.tensors.pop("embed_tokens.weight", None)
    if own is not None and not torch.equal(own, embedding.to(own.dtype)):
        raise ValueError(
            "tensor embed_tokens.weight is not the target's; a head with an embedding of its own is not supported"
        )
    # Of no meaning for a head: with the target's, one of the same shape can be swapped in for it.
    for key in ("bos_token_id", "eos_token_id", "max_position_embeddings"):
        setattr(head.layer, key, getattr(source, key))
    config = _config(head.layer, head.draft_vocab_size, head.taps, target)
    if head.norm_before_residual:
        config["norm_before_residual"] = True
    if not _is_subset(config) and not head.tensors.get("d2t", torch.zeros(1)).any():
        head.tensors.pop("d2t", None)
    _require_fit(head.tensors, config)
    adopted = Eagle3(config, embedding.float())
    adopted.load_state_dict(head.tensors)
    return adopted


def vllm_config(directory: Path) -> dict[str, Any]:
    """Return what vLLM's speculative_config says of this draft."""
    return {"method": "eagle3", "model": str(directory)}


def expected_shapes(config: dict[str, Any]) -> Shapes:
    """Return shape and dtype of every tensor of a checkpoint."""
    with torch.device("meta"):
        head = Eagle3(config, torch.empty(1, 1))
    dtype = getattr(torch, config.get("dtype", "bfloat16"))
    return {
        name: (tuple(t.shape), dtype if t.is_floating_point() else t.dtype) for name, t in head.state_dict().items()
    }


def _is_subset(config: dict[str, Any]) -> bool:
    return bool(config["draft_vocab_size"] != config["vocab_size"])


def _require_fit(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    """Raise ValueError unless tensors are a head's, its vocabulary an ascending part of the target's."""
    require_tensors(tensors, expected_shapes(config))
    if "d2t" not in tensors:
        return
    tokens = tensors["d2t"] + torch.arange(len(tensors["d2t"]))
    if int(tokens[0]) < 0 or int(tokens[-1]) >= config["vocab_size"] or not bool((tokens.diff() > 0).all()):
        raise ValueError(
            f"d2t must name ascending tokens of 0 to {config['vocab_size'] - 1}; "
            f"got {int(tokens.min())} to {int(tokens.max())}"
        )


def _require_same_tokens(directory: Path, target_dir: Path) -> None:
    """Raise ValueError if a head brings a tokenizer that is not the target's."""
    file, known = directory / "tokenizer.json", target_dir / "tokenizer.json"
    if not file.is_file() or not known.is_file():
        return
    own, wanted = (Tokenizer.from_file(str(path)).get_vocab() for path in (file, known))
    if differing := sorted(token for token in own.keys() | wanted.keys() if own.get(token) != wanted.get(token)):
        raise ValueError(
            f"the head's tokenizer is not the target's: {len(differing)} tokens differ, such as {differing[0]!r}"
        )


def _default_layers(num_layers: int) -> tuple[int, ...]:
    return tuple(sorted({max(1, num_layers // 3), max(1, 2 * num_layers // 3), num_layers}))


def _config(source: Any, vocab_size: int, layers: tuple[int, ...], card: TargetCard) -> dict[str, Any]:
    width = getattr(source, "head_dim", None) or source.hidden_size // source.num_attention_heads
    config = {
        "architectures": list(ARCHITECTURES),
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
        "draft_vocab_size": vocab_size,
        "eagle_aux_hidden_state_layer_ids": list(layers),
        "bos_token_id": source.bos_token_id,
        "eos_token_id": source.eos_token_id,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "redraft": made_for(card),
    }
    if len(layers) != 3:
        config["num_aux_hidden_states"] = len(layers)
        config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": list(layers)}
    return config


def _start_from_last_layer(head: Eagle3, target_dir: Path, last: int) -> None:
    hidden = head.config["hidden_size"]
    with torch.no_grad():
        head.fc.weight.zero_()
        head.fc.weight[:, -hidden:] = torch.eye(hidden)
        for name, parameter in head.midlayer.named_parameters():
            if name == "hidden_norm.weight":
                parameter.copy_(read_tensor(target_dir, f"model.layers.{last}.input_layernorm.weight"))
            elif name == "input_layernorm.weight":
                parameter.fill_(1.0)
            elif name.split(".")[-2] in ("q_proj", "k_proj", "v_proj"):
                parameter.zero_()
                parameter[:, hidden:] = read_tensor(target_dir, f"model.layers.{last}.{name}")
            else:
                parameter.copy_(read_tensor(target_dir, f"model.layers.{last}.{name}"))
        head.norm.weight.copy_(read_tensor(target_dir, "model.norm.weight"))


def _set_vocabulary(head: Eagle3, target_dir: Path, vocabulary: Tensor) -> None:
    with torch.no_grad():
        head.d2t.copy_(vocabulary - torch.arange(len(vocabulary)))
        head.lm_head.weight.copy_(output_embedding(target_dir)[vocabulary])
