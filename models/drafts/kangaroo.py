"""Kangaroo: the target's first layers draft, and a small trained adapter makes up for those that are left out.

The adapter is an attention with its norm, and a norm before the target's own output matrix: no MLP, no matrix of the
vocabulary. It reads the states after the first layers: of certain tokens those that the target's pass has made, of
drafted ones those that it makes itself, which the target's pass then takes up (`models.drafting.self_draft`). The
paper's second exit, from drafting once the draft is unsure, is length policy `confidence`.
"""

from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from pydantic import Field
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoConfig, LlamaConfig

from models.checkpoints.checkpoint import output_embedding, read_stored, read_tensor
from models.drafting.draft_files import Shapes, check_config, made_for, read_config, require_tensors, write_config
from models.drafting.self_draft import Drafter, TargetPart
from models.drafts import KeepRows, Rows, Unrolled, step_by_step
from models.layers.decoder import Begun, Cache, Decoder, Sublayers, rope_frequencies
from models.params import BaseParams
from models.targets import MODEL_TYPES, TargetCard, describe

PAPER = "arXiv:2404.18911"
FAMILY = "kangaroo"
WEIGHTS = "model.safetensors"
ARCHITECTURES = ("KangarooDraft",)
TRAINED = True
SERVED = False


class Params(BaseParams):
    """Where it leaves the target.

    Attributes:
        exit_layer: E, how many of the first layers draft; by default a tenth of them, as the paper's 3 of 40.
    """

    name: Literal["kangaroo"] = "kangaroo"
    exit_layer: int | None = Field(None, ge=1)


class Kangaroo(TargetPart):
    """The adapter; the target's output matrix is borrowed, never trained and never saved."""

    max_unroll = 1
    frequencies: Tensor
    head: Tensor

    def __init__(self, config: dict[str, Any], head: Tensor) -> None:
        super().__init__()
        self.config = config
        hidden, width, eps = config["hidden_size"], config["head_dim"], config["rms_norm_eps"]
        self.num_heads, self.num_kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.head_dim = width
        self.input_layernorm, self.norm = (nn.RMSNorm(hidden, eps) for _ in range(2))
        self.self_attn = nn.ModuleDict(
            {
                "q_proj": nn.Linear(hidden, self.num_heads * width, bias=False),
                "k_proj": nn.Linear(hidden, self.num_kv_heads * width, bias=False),
                "v_proj": nn.Linear(hidden, self.num_kv_heads * width, bias=False),
                "o_proj": nn.Linear(self.num_heads * width, hidden, bias=False),
            }
        )
        self.register_buffer("head", head, persistent=False)
        frequencies, self.rope_scale = rope_frequencies(LlamaConfig(**config), width)
        self.register_buffer("frequencies", frequencies, persistent=False)

    @property
    def taps(self) -> tuple[int, ...]:
        """The states after the first layers."""
        return (int(self.config["exit_layer"]),)

    @property
    def vocabulary(self) -> Tensor:
        """All of the target's."""
        return torch.arange(self.config["vocab_size"], device=self.head.device)

    @property
    def skipped(self) -> Sublayers:
        """All after the exit."""
        rest = frozenset(range(self.config["exit_layer"], self.config["num_hidden_layers"]))
        return Sublayers(rest, rest)

    def unroll(self, rows: Rows, num_steps: int, keep: KeepRows | None = None) -> list[Unrolled]:
        """See `models.drafts.Draft`; states of tokens that are drafted are those of a copy of the target."""
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
        """See `models.drafts.Draft`."""
        return _Drafter(self, max_len)

    def keys_values(self, states: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        """[n, H] after the first layers, at places [n] → keys and values [n, kv heads, width]."""
        normed = self.input_layernorm(states)
        keys = self._rotated(self.self_attn["k_proj"](normed), places)
        return keys, self.self_attn["v_proj"](normed).unflatten(-1, (self.num_kv_heads, self.head_dim))

    def adapt(self, states: Tensor, places: Tensor, keys: Tensor, values: Tensor, seen: Tensor | None = None) -> Tensor:
        """Return what the output matrix multiplies.

        Args:
            states: [n, H] after the first layers.
            places: [n] of each.
            keys, values: [T, kv heads, width], their own too.
            seen: [n, T] which of them each sees; None for all.

        Returns:
            [n, H].
        """
        queries = self._rotated(self.self_attn["q_proj"](self.input_layernorm(states)), places).transpose(0, 1)
        groups = self.num_heads // self.num_kv_heads
        keys, values = (one.transpose(0, 1).repeat_interleave(groups, 0) for one in (keys, values))
        attended = functional.scaled_dot_product_attention(queries[None], keys[None], values[None], attn_mask=seen)[0]
        adapted: Tensor = self.norm(states + self.self_attn["o_proj"](attended.transpose(0, 1).flatten(1)))
        return adapted

    def _rotated(self, projected: Tensor, places: Tensor) -> Tensor:
        """[n, heads·width] at places [n] → [n, heads, width]."""
        heads = projected.unflatten(-1, (-1, self.head_dim))
        angles = places[:, None, None].float() * self.frequencies
        cos, sin = angles.cos() * self.rope_scale, angles.sin() * self.rope_scale
        first, second = heads.chunk(2, dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class _Drafter(Drafter):
    """See `models.drafting.self_draft.Drafter`; what is certain is written over the adapter's keys of drafted
    tokens."""

    draft: Kangaroo

    def __init__(self, draft: Kangaroo, max_len: int) -> None:
        super().__init__(draft, max_len)
        shape = (max_len, draft.num_kv_heads, draft.head_dim)
        self._keys, self._values = (torch.zeros(shape, device=draft.head.device) for _ in range(2))

    def extend(self, token_ids: Tensor, hidden: Tensor) -> None:
        """See the base."""
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


def create(params: Params, target_dir: Path, token_counts: np.ndarray) -> Kangaroo:
    """Make an adapter that starts as the attention of the first layer that is left out, and the target's last norm.

    Args:
        params: where it exits.
        target_dir: the target's directory (Llama layout).
        token_counts: not read; the vocabulary is the target's.

    Raises:
        ValueError: the target is of another layout, or its last layer is not after the exit.
    """
    source = AutoConfig.from_pretrained(target_dir)
    if source.model_type not in MODEL_TYPES:
        raise ValueError(f"kangaroo takes targets of {', '.join(MODEL_TYPES)}; got {source.model_type}")
    num_layers = source.num_hidden_layers
    exit_layer = max(num_layers // 10, 1) if params.exit_layer is None else params.exit_layer
    _require_exit(exit_layer, num_layers)
    config = {
        "architectures": list(ARCHITECTURES),
        "exit_layer": exit_layer,
        "hidden_size": source.hidden_size,
        "num_attention_heads": source.num_attention_heads,
        "num_key_value_heads": source.num_key_value_heads,
        "head_dim": getattr(source, "head_dim", None) or source.hidden_size // source.num_attention_heads,
        "num_hidden_layers": num_layers,
        "rms_norm_eps": source.rms_norm_eps,
        "rope_parameters": dict(source.rope_parameters),
        "max_position_embeddings": source.max_position_embeddings,
        "vocab_size": source.vocab_size,
        "dtype": "bfloat16",
        "redraft": made_for(describe(target_dir)),
    }
    draft = _of(config, target_dir)
    layer = f"model.layers.{exit_layer}"
    with torch.no_grad():
        for name, parameter in draft.named_parameters():
            parameter.copy_(
                read_tensor(target_dir, "model.norm.weight" if name == "norm.weight" else f"{layer}.{name}")
            )
    return draft


def renew(draft: Kangaroo, target_dir: Path, token_counts: np.ndarray) -> Kangaroo:
    """Return the draft as it is: it can say every token already."""
    return draft


def save(draft: Kangaroo, directory: Path) -> None:
    """Write config.json and bfloat16 safetensors into `directory`."""
    tensors = {name: one.detach().to(torch.bfloat16).contiguous().cpu() for name, one in draft.state_dict().items()}
    save_file(tensors, directory / WEIGHTS, metadata={"format": "pt"})
    write_config(draft.config, FAMILY, directory)


def load(directory: Path, target_dir: Path) -> Kangaroo:
    """Read a draft back, in float32; ValueError as `check`."""
    check(directory, like=None, target=describe(target_dir))
    draft = _of(read_config(directory, FAMILY, ARCHITECTURES), target_dir)
    draft.load_state_dict(load_file(directory / WEIGHTS))
    return draft.float()


def check(directory: Path, like: Path | None, target: TargetCard) -> None:
    """See `models.drafts.Family`."""
    config = read_config(directory, FAMILY, ARCHITECTURES)
    check_config(config, directory, None if like is None else read_config(like, FAMILY, ARCHITECTURES), target)
    for key, wanted in (("hidden_size", target.hidden_size), ("num_hidden_layers", target.num_layers)):
        if config.get(key) != wanted:
            raise ValueError(f"draft {directory.name} has {key} {config.get(key)}, the target has {wanted}")
    _require_exit(config.get("exit_layer"), target.num_layers)
    require_tensors(read_stored(directory), expected_shapes(config))


def vllm_config(directory: Path) -> dict[str, Any]:
    """Raise a ValueError: vLLM has no such proposer."""
    raise ValueError(f'vLLM can\'t draft with family {FAMILY}; engine "torch" can')


def vllm_weights(directory: Path) -> None:
    """Return None: vLLM loads nothing of it."""


def expected_shapes(config: dict[str, Any]) -> Shapes:
    """Return shape and dtype of every tensor of a checkpoint."""
    with torch.device("meta"):
        draft = Kangaroo(config, torch.empty(1, 1))
    return {name: (tuple(tensor.shape), torch.bfloat16) for name, tensor in draft.state_dict().items()}


def _of(config: dict[str, Any], target_dir: Path) -> Kangaroo:
    draft = Kangaroo(config, output_embedding(target_dir))
    draft.target_dir = target_dir
    return draft


def _require_exit(exit_layer: Any, num_layers: int) -> None:
    if type(exit_layer) is not int or not 1 <= exit_layer < num_layers:
        raise ValueError(
            f"exit_layer must be 1 to {num_layers - 1}, before the last of the target's layers; got {exit_layer}"
        )
