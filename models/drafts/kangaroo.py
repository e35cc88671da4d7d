"""Kangaroo: the target's first layers draft, and a small trained adapter makes up for those that are left out.

The adapter is an attention with its norm, and a norm before the target's own output matrix: no MLP, no matrix of the
vocabulary. It reads the states after the first layers: of certain tokens those that the target's pass has made, of
drafted ones those that it makes itself, which the target's pass then takes up (`models.core.drafting.self_draft`). The
paper's second exit, from drafting once the draft is unsure, is length policy `confidence`.
"""

from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from models.core.checkpoints.loading import read_tensor
from models.core.checkpoints.readout import output_embedding
from models.core.drafting import draft_format
from models.core.drafting.draft_format import HEAD_SIZES, require_llama_layout
from models.core.drafting.drafters import require_width, step_by_step
from models.core.drafting.features import LayeredDraft, layer_config, linear
from models.core.drafting.self_draft import Drafter, TargetRunner, after_exit
from models.core.layers.decoder import Begun, Cache, Decoder
from models.drafts import KeepRows, Procedure, Rows, Unrolled
from models.losses import forward_kl
from models.params import BaseParams
from models.targets import TargetCard, target_config

PAPER = "arXiv:2404.18911"
FAMILY = "kangaroo"
ARCHITECTURES = ("KangarooDraft",)
SERVED = False


class Params(BaseParams):
    """Where it leaves the target.

    Attributes:
        exit_layer: E, how many of the first layers draft; by default a tenth of them, as the paper's 3 of 40.
    """

    name: Literal["kangaroo"] = "kangaroo"
    exit_layer: int | None = Field(None, ge=1)


class Kangaroo(TargetRunner, LayeredDraft):
    """The adapter; the target's output matrix is borrowed, never trained and never saved."""

    procedure = Procedure(loss=forward_kl.Params())
    max_unroll = 1
    expands = False
    head: Tensor

    def __init__(self, config: dict[str, Any]) -> None:
        """See the base; ValueError if the exit is not one of the target's."""
        super().__init__(config)
        self.skipped = after_exit(config.get("exit_layer"), config["num_hidden_layers"])
        hidden, queries, keys = config["hidden_size"], self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        self.input_layernorm, self.norm = (nn.RMSNorm(hidden, self.eps) for _ in range(2))
        into = {"q_proj": linear(hidden, queries), "k_proj": linear(hidden, keys), "v_proj": linear(hidden, keys)}
        self.self_attn = nn.ModuleDict({**into, "o_proj": linear(queries, hidden)})
        self.register_buffer("head", torch.empty(0), persistent=False)

    def borrow(self, target_dir: Path) -> Self:
        self.head = output_embedding(target_dir)
        return super().borrow(target_dir)

    @property
    def taps(self) -> tuple[int, ...]:
        return (int(self.config["exit_layer"]),)

    @property
    def vocabulary(self) -> Tensor:
        return torch.arange(self.config["vocab_size"], device=self.head.device)

    def unroll(self, rows: Rows, num_steps: int, keep: KeepRows | None = None) -> list[Unrolled]:
        """See `models.drafts.Draft`; states of tokens that are drafted are those of a copy of the target."""
        require_width(self, rows.hidden, self.config["hidden_size"])
        target, adapted = self.decoder(), rows.hidden.new_zeros(len(rows.index), num_steps, rows.hidden.shape[-1])
        for sequence in rows.sequence.unique().tolist():
            here = (rows.sequence == sequence).nonzero()[:, 0]
            index = rows.index[here]
            stop = int(index.max()) + 1 + num_steps
            with torch.no_grad():
                _, begun = target.partial(rows.token_ids[sequence, :stop], Cache(target, stop), self.skipped)
            places = torch.arange(stop, device=index.device)
            read, own = rows.hidden[sequence, : stop - num_steps].float(), begun.states
            known = [self.keys_values(states, places[: len(states)]) for states in (read, own)]
            keys, values = (torch.cat(both) for both in zip(*known, strict=True))
            asked = index[:, None] + 1 + torch.arange(num_steps, device=index.device)
            last = index.repeat_interleave(num_steps)[:, None]
            seen = torch.cat([places[: len(read)] <= last, (places > last) & (places <= asked.flatten()[:, None])], 1)
            states = self.adapt(own[asked.flatten()], asked.flatten(), keys, values, seen)
            adapted[here] = states.unflatten(0, asked.shape)

        def say(step: int, running: Tensor) -> tuple[Tensor, Tensor]:
            hidden = adapted[running, step]
            return hidden, hidden @ self.head.T

        return step_by_step(torch.arange(len(rows.index), device=rows.index.device), num_steps, keep, say)

    def drafter(self, max_len: int) -> "_Drafter":
        return _Drafter(self, max_len)

    def keys_values(self, states: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        """[n, H] after the first layers, at places [n] → keys and values [n, kv heads, width]."""
        normed = self.input_layernorm(states)
        keys = self.rotated(self.self_attn["k_proj"](normed), self.num_kv_heads, places)
        return keys, self.self_attn["v_proj"](normed).unflatten(-1, (self.num_kv_heads, self.head_dim))

    def adapt(self, states: Tensor, places: Tensor, keys: Tensor, values: Tensor, seen: Tensor | None = None) -> Tensor:
        """Return [n, H] what the output matrix multiplies, of states [n, H] after the first layers at `places` [n].
        `keys` and `values` [T, kv heads, width], their own too, are seen as `seen` [n, T] says; None for all."""
        queries = self.rotated(self.self_attn["q_proj"](self.input_layernorm(states)), self.num_heads, places)
        query, key, value = (one.transpose(0, 1)[None] for one in (queries, keys, values))
        attended = functional.scaled_dot_product_attention(query, key, value, attn_mask=seen, enable_gqa=True)[0]
        adapted: Tensor = self.norm(states + self.self_attn["o_proj"](attended.transpose(0, 1).flatten(1)))
        return adapted


class _Drafter(Drafter):
    """See `models.core.drafting.self_draft.Drafter`; what is certain is written over the adapter's keys of drafted
    tokens."""

    draft: Kangaroo

    def __init__(self, draft: Kangaroo, max_len: int) -> None:
        super().__init__(draft, max_len)
        shape = (max_len, draft.num_kv_heads, draft.head_dim)
        self._keys, self._values = (torch.zeros(shape, device=draft.head.device) for _ in range(2))

    def extend(self, token_ids: Tensor, hidden: Tensor) -> None:
        start = max(len(self.known) - 1, 0)
        super().extend(token_ids, hidden)
        self._write(hidden.float(), start)

    def _logits(self, target: Decoder, states: Tensor, begun: Begun) -> Tensor:
        read = begun.states.float()
        place = len(self.known) - 1 + len(self._begun)
        places = self._write(read, place)
        adapted = self.draft.adapt(read, places, self._keys[: place + 1], self._values[: place + 1])
        return target.logits(adapted.to(target.dtype))

    def _write(self, states: Tensor, start: int) -> Tensor:
        """Put the keys and values of [n, H] in their places [n], which follow each other, and return these."""
        stop = start + len(states)
        places = torch.arange(start, stop, device=states.device)
        self._keys[start:stop], self._values[start:stop] = self.draft.keys_values(states, places)
        return places


class Format(draft_format.Format[Kangaroo]):
    def check(self, directory: Path, like: Path | None, target: TargetCard) -> None:
        """See the base; a draft for a target of another depth is refused as well."""
        super().check(directory, like, target)
        num_layers = self.read(directory)["num_hidden_layers"]
        if num_layers != target.num_layers:
            raise ValueError(
                f"draft {directory.name} has num_hidden_layers {num_layers}, the target has {target.num_layers}"
            )


_format = Format(FAMILY, ARCHITECTURES, Kangaroo, (*HEAD_SIZES, "num_hidden_layers"))
renew, save, load, check = _format.renew, _format.save, _format.load, _format.check
vllm_config, vllm_weights = _format.vllm_config, _format.vllm_weights


def create(params: Params, target_dir: Path, token_counts: np.ndarray) -> Kangaroo:
    """Make an adapter that starts as the attention of the first layer that is left out, and the target's last norm; see
    `models.drafts.Family`."""
    source = target_config(target_dir)
    require_llama_layout(source.model_type, FAMILY)
    num_layers, shape = source.num_hidden_layers, layer_config(source)
    exit_layer = max(num_layers // 10, 1) if params.exit_layer is None else params.exit_layer
    kept = (*HEAD_SIZES, "rms_norm_eps", "rope_parameters", "max_position_embeddings", "dtype")
    own = {**{key: shape[key] for key in kept}, "exit_layer": exit_layer, "num_hidden_layers": num_layers}
    draft = _format.new(own, target_dir)
    with torch.no_grad():
        for name, parameter in draft.named_parameters():
            stored = "model.norm.weight" if name == "norm.weight" else f"model.layers.{exit_layer}.{name}"
            parameter.copy_(read_tensor(target_dir, stored))
    return draft
