"""Draft families of K heads on the target's last hidden state: head k drafts the k-th token after the last certain one.

All heads of a step read one state, that of the token before the last certain one, so a draft has no cache. Head k is
residual layers, x + SiLU(W x + b), and an output matrix over the draft's vocabulary; what goes into it is all that
families differ in. A new head's layers pass the state through and its output matrix is the target's, so that it begins
by saying what the target said.

The output matrices are learnt, and a refresh goes on with the optimizer's moments of their rows: the vocabulary of a
draft stays what it was made with.

Letters beyond those of `models.drafts`: n rows of a pass.
"""

from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from models.core.checkpoints.loading import choose_vocabulary, read_tensor
from models.core.checkpoints.readout import output_embedding
from models.core.drafting import draft_format
from models.core.drafting.draft_format import require_llama_layout, require_vocab_size
from models.core.drafting.drafters import require_width, step_by_step
from models.core.drafting.features import PathDrafter
from models.drafts import Draft, KeepRows, Rows, Unrolled
from models.params import BaseParams
from models.targets import target_config

SIZES = ("hidden_size", "vocab_size", "truncated_vocab_size", "num_heads", "num_hidden_layers")


class HeadsParams(BaseParams):
    """Shape of new heads.

    Attributes:
        num_heads: K, the most tokens that are drafted one after the other.
        num_layers: residual layers of each head.
        vocab_size: D, at most the target's; 0 is all of it.
    """

    num_heads: int = Field(4, ge=1)
    num_layers: int = Field(1, ge=1)
    vocab_size: int = Field(4096, ge=0)


class Heads(Draft):
    """The heads; parameters carry the names of the checkpoint. The target's last norm is borrowed."""

    expands = True
    token_map: Tensor
    norm: Tensor

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.config, self.num_target_layers, self.eps = config, 0, 0.0
        hidden, size = config["hidden_size"], config["truncated_vocab_size"]
        numbers = range(config["num_heads"])
        depth = config["num_hidden_layers"]
        self.blocks = nn.ModuleList(Block(self.num_inputs(head) * hidden, hidden, depth) for head in numbers)
        self.lm_heads = nn.ModuleList(nn.Linear(hidden, size, bias=False) for _ in numbers)
        self.register_buffer("token_map", torch.arange(size), persistent=size < config["vocab_size"])
        self.register_buffer("norm", torch.ones(hidden), persistent=False)

    @abstractmethod
    def num_inputs(self, head: int) -> int:
        """Return how many vectors of width H a head reads, the state first; heads count from 0."""

    @abstractmethod
    def inputs(self, head: int, state: Tensor, token_ids: Tensor) -> Tensor:
        """Return what a head, counted from 0, reads, [n, num_inputs · H].

        `state` [n, H] is the target's last hidden state, normed; `token_ids` [n, head + 1] are the last certain
        token and those that the heads before have drafted.
        """

    def borrow(self, target_dir: Path) -> Self:
        config = target_config(target_dir)
        self.num_target_layers, self.eps = config.num_hidden_layers, config.rms_norm_eps
        self.norm = read_tensor(target_dir, "model.norm.weight").float()
        return self

    @property
    def max_depth(self) -> int:  # type: ignore[override]  # a number that the class does not know
        return len(self.blocks)

    @property
    def taps(self) -> tuple[int, ...]:
        return (self.num_target_layers,)

    @property
    def vocabulary(self) -> Tensor:
        return self.token_map

    def num_unrolled(self, num_draft_tokens: int) -> int:
        """Return K: a tree may have more nodes than heads, so how many are served does not tell which heads are."""
        return self.max_depth

    def normed(self, hidden: Tensor) -> Tensor:
        """[n, H] the target's last residual stream → what its output matrix multiplies; ValueError at another width."""
        require_width(self, hidden, len(self.norm))
        return functional.rms_norm(hidden.float(), self.norm.shape, self.norm, self.eps)

    def say(self, head: int, state: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return what a head's output matrix multiplies [n, H], and its logits [n, D]; arguments as of `inputs`."""
        hidden = self.blocks[head](self.inputs(head, state, token_ids))
        return hidden, self.lm_heads[head](hidden)

    def unroll(self, rows: Rows, num_steps: int, keep: KeepRows | None = None) -> list[Unrolled]:
        state = self.normed(rows.hidden[rows.sequence, rows.index])

        def say(step: int, running: Tensor) -> tuple[Tensor, Tensor]:
            places = rows.index[running, None] + torch.arange(1, step + 2, device=running.device)
            return self.say(step, state[running], rows.token_ids[rows.sequence[running, None], places])

        running = torch.arange(len(rows.index), device=rows.index.device)
        return step_by_step(running, min(num_steps, self.max_depth), keep, say)

    def drafter(self, max_len: int) -> "_Drafter":
        return _Drafter(self)


class Block(nn.Module):
    """Residual layers, x + SiLU(W x + b); where the input is wider than the output, the first one narrows it by R x."""

    def __init__(self, num_inputs: int, width: int, num_layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width if number else num_inputs, width) for number in range(num_layers))
        self.residual = nn.Linear(num_inputs, width, bias=False) if num_inputs > width else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = (x if number else self.residual(x)) + functional.silu(layer(x))
        return x

    @torch.no_grad()
    def pass_through(self) -> None:
        """Let the first inputs through as they are, and nothing else."""
        for parameter in self.parameters():
            parameter.zero_()
        if isinstance(self.residual, nn.Linear):
            width = self.residual.out_features
            self.residual.weight[:, :width] = torch.eye(width)


class _Drafter(PathDrafter):
    """See the base; each head is a pass."""

    draft: Heads

    def __init__(self, draft: Heads) -> None:
        self.draft = draft
        self._state = self._last = torch.empty(0)

    def extend(self, token_ids: Tensor, hidden: Tensor) -> None:
        self._state, self._last = self.draft.normed(hidden[-1:]), token_ids[-1:]

    def _after(self, paths: Sequence[tuple[int, ...]]) -> Tensor:
        logits = self._state.new_empty(len(paths), len(self.draft.token_map))
        for head in {len(path) for path in paths}:
            places = [place for place, path in enumerate(paths) if len(path) == head]
            read = torch.tensor([[int(self._last), *paths[place]] for place in places], device=logits.device)
            logits[places] = self.draft.say(head, self._state.expand(len(read), -1), read)[1]
        return logits


class Format(draft_format.Format[Heads]):
    """See the base; the names in config.json and of the tensors are those of vLLM's Medusa."""

    def create(self, params: HeadsParams, target_dir: Path, token_counts: np.ndarray) -> Heads:
        """Make heads that say what the target's last state says; see `models.drafts.Family`."""
        source = target_config(target_dir)
        require_llama_layout(source.model_type, self._family)
        size = params.vocab_size or source.vocab_size
        require_vocab_size(size, source.vocab_size)
        draft = self.new(
            {
                "model_type": self._family,
                "hidden_size": source.hidden_size,
                "num_heads": params.num_heads,
                "num_hidden_layers": params.num_layers,
                "vocab_size": source.vocab_size,
                "truncated_vocab_size": size,
                "medusa_fc_bias": True,
                "dtype": "bfloat16",
            },
            target_dir,
        )
        with torch.no_grad():
            draft.token_map.copy_(choose_vocabulary(token_counts, size))
            rows = output_embedding(target_dir)[draft.token_map]
            for block, matrix in zip(draft.blocks, draft.lm_heads, strict=True):
                block.pass_through()  # type: ignore[operator]  # of a list of modules no more is known
                matrix.weight.copy_(rows)  # type: ignore[operator]  # nor of its tensor
        return draft
