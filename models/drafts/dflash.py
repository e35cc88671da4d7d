"""DFlash: a block-diffusion draft, which says a whole block in one pass over masks.

    x(t+1), [mask], …, [mask]  →  layers that see the target's states ≤ t and the whole block  →  –, q₁, q₂, …

The target's tapped states, as one product and normed, go into the keys and values of every layer beside the block's
own; queries are the block's alone. Each place of a block sees all others, but not which tokens they become. A block
always has `block_size` places, the last certain token among them, as in training; what was not asked for is thrown
away.

Trained as the paper says: cross-entropy to the tokens that came, in all places of a block at once, place k with weight
exp(−(k − 1) / 4), as vLLM's trainer `speculators` has it for blocks of 8. That draws some rows of a text as beginnings
of blocks, here every row is one.

The directory is in the layout of vLLM's DFlash (`dflash_config`), and served. Its block has one place more than tokens
are drafted (read in vLLM 0.32: v1/spec_decode/dflash.py); as each place sees all others, K must be what a block was
trained for. Where a plan asks for fewer tokens, the block stays whole and its first ones are taken.
"""

import math
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from models.core.checkpoints.loading import read_tensor
from models.core.drafting.drafters import step_by_step
from models.core.drafting.eagle3_heads import Format, MaskedParams, TappedDraft, engine_weights, require_mask
from models.core.drafting.features import PathDrafter, Scale, decoder_layer, start_as
from models.drafts import KeepRows, Procedure, Rows, Unrolled
from models.losses import cross_entropy

PAPER = "arXiv:2602.06036; github.com/vllm-project/speculators, DFlash"
ARCHITECTURES = ("DFlashDraftModel",)
SERVED = True


class Params(MaskedParams):
    """Shape of a new draft."""

    name: Literal["dflash"] = "dflash"
    num_layers: int = Field(2, ge=1, description="decoder layers.")
    block_size: int = Field(8, ge=2, description="places of a block; one less are drafted.")

    def more(self, vocab_size: int) -> dict[str, Any]:
        return {
            "model_type": "qwen3",
            "num_hidden_layers": self.num_layers,
            "block_size": self.block_size,
            "dflash_config": {"mask_token_id": self.mask(vocab_size), "causal": False},
        }


class DFlash(TappedDraft):
    procedure = Procedure(loss=cross_entropy.Params(), follow="all", step_decay=math.exp(-1 / 4))

    def make_layers(self) -> None:
        """Set the norm of what is injected, and layers with normed queries and keys; ValueError if the mask is no token
        of the target's, or a size is none."""
        for key, least in (("num_hidden_layers", 1), ("block_size", 2)):
            if not isinstance(self.config.get(key), int) or self.config[key] < least:
                raise ValueError(f"{key} must be a number from {least}; got {self.config.get(key)!r}")
        masked = self.config.get("dflash_config")
        token_id = masked.get("mask_token_id") if isinstance(masked, dict) else None
        self.mask_token_id = require_mask(token_id, self.config["vocab_size"])
        self.hidden_norm = Scale(self.config["hidden_size"])
        width, numbers = self.config["hidden_size"], range(self.config["num_hidden_layers"])
        self.layers = nn.ModuleList(decoder_layer(self.config, width, head_norms=True) for _ in numbers)

    @property
    def max_depth(self) -> int:  # type: ignore[override]  # a number that the class does not know
        return int(self.config["block_size"]) - 1

    def num_unrolled(self, num_draft_tokens: int) -> int:
        """Return what a block drafts: how much of it is asked for in serving changes nothing of it."""
        return self.max_depth

    def unroll(self, rows: Rows, num_steps: int, keep: KeepRows | None = None) -> list[Unrolled]:
        injected = self.inject(rows.hidden, torch.arange(rows.hidden.shape[1], device=rows.hidden.device))
        last = rows.token_ids[rows.sequence, rows.index + 1]
        states = self.run_block(last, rows.sequence, rows.index, injected)
        running = torch.arange(len(rows.index), device=rows.index.device)
        num_steps = min(num_steps, self.max_depth)
        return step_by_step(running, num_steps, keep, lambda step, running: self.say(states[running, step]))

    def inject(self, hidden: Tensor, positions: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return for each layer the keys and values [B, T, kv heads, width] of tapped states [B, T, A·H]."""
        combined = self.normed(self.combine(hidden), self.hidden_norm)
        return [self._keys_values(layer, combined, positions) for layer in self.layers]

    def run_block(self, last: Tensor, sequence: Tensor, index: Tensor, injected: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Run the block of rows [n], behind the last certain token of each, through all layers: [n, size − 1, H].

        `sequence` and `index` [n] are as in `Rows`, rows of one sequence contiguous; `injected` is what `inject`
        returns.
        """
        token_ids = functional.pad(last[:, None], (0, self.max_depth), value=self.mask_token_id)
        positions = index[:, None] + 1 + torch.arange(token_ids.shape[1], device=index.device)
        state = functional.embedding(token_ids, self.embedding)
        layer: Any
        for layer, text in zip(self.layers, injected, strict=True):
            attention = layer["self_attn"]
            x = self.normed(state, layer["input_layernorm"])
            queries = self.project(attention, "q", x, positions)
            own = self._keys_values(layer, x, positions)
            attended = attention["o_proj"](self.attend(queries, own, sequence, index, text))
            state = self.feed_forward(layer, state + attended)
        return state[:, 1:]

    def drafter(self, max_len: int) -> "_Drafter":
        return _Drafter(self, max_len)

    def _keys_values(self, layer: Any, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        attention = layer["self_attn"]
        keys = self.project(attention, "k", x, positions)
        return keys, attention["v_proj"](x).unflatten(-1, (self.num_kv_heads, self.head_dim))


class _Drafter(PathDrafter):
    """See the base; what follows a node hangs on its depth alone."""

    draft: DFlash

    def __init__(self, draft: DFlash, max_len: int) -> None:
        self.draft = draft
        shape = (1, max_len, draft.num_kv_heads, draft.head_dim)
        device = draft.embedding.device
        self._text = [tuple(torch.empty(shape, device=device) for _ in range(2)) for _ in draft.layers]
        self._length = 0
        self._last, self._logits = torch.empty(0), torch.empty(0)
        self._run_by: DFlash | None = None

    def extend(self, token_ids: Tensor, hidden: Tensor) -> None:
        start, stop = self._length, self._length + len(hidden)
        positions = torch.arange(start, stop, device=hidden.device)
        for held, new in zip(self._text, self.draft.inject(hidden[None].float(), positions), strict=True):
            for whole, part in zip(held, new, strict=True):
                whole[:, start:stop] = part
        self._last, self._length, self._run_by = token_ids[-1:], stop, None

    def _after(self, paths: Any) -> Tensor:
        if self._run_by is not self.draft:
            text = [(keys[:, : self._length], values[:, : self._length]) for keys, values in self._text]
            row = torch.zeros_like(self._last)
            states = self.draft.run_block(self._last, row, row + self._length - 1, text)
            self._logits, self._run_by = self.draft.say(states[0])[1], self.draft
        return self._logits[[len(path) for path in paths]]


def _start(draft: DFlash, target_dir: Path, last: int) -> None:
    draft.hidden_norm.weight.copy_(read_tensor(target_dir, f"model.layers.{last}.input_layernorm.weight"))
    for number, layer in enumerate(draft.layers, last + 1 - len(draft.layers)):
        start_as(layer, target_dir, max(number, 0))


_format = Format("dflash", ARCHITECTURES, DFlash, _start)
create, renew, save, load, check = _format.create, _format.renew, _format.save, _format.load, _format.check
vllm_weights, require_target = engine_weights, _format.require_target


def require_served(params: Params, num_draft_tokens: int) -> None:
    if params.block_size != num_draft_tokens + 1:
        raise ValueError(
            f"vLLM drafts whole blocks, of one token less than their size; got blocks of {params.block_size} for "
            f"{num_draft_tokens} tokens: set block_size = {num_draft_tokens + 1} in [draft]"
        )


def vllm_config(directory: Path) -> dict[str, Any]:
    config = _format.read(directory)
    settings = {"num_speculative_tokens": config["block_size"] - 1, "parallel_drafting": True}
    return {"method": "dflash", "model": str(directory), **settings}
