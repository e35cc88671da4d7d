"""P-EAGLE: an EAGLE-3 head that drafts all K tokens in one pass.

    [x(t+1); h(t)], [mask; h*], …, [mask; h*]  →  layer  →  q₁, q₂, …, q_K

Where EAGLE-3 would read its own output and the token drafted from it, the later places read a token that stands for
none and a learnt vector h* in place of the target's states, the same in all of them; position and attention to what
came before tell them apart.

Trained on the target's distributions, every place on every row that is kept: of the rows of a place the next one keeps
a share drawn by chance (COD sampling), at least so many of all. The paper's drafts have up to four layers, which these
don't.

The directory is in the layout of vLLM's `parallel_drafting` (`mask_hidden`, `ptd_token_id`), and served. There a
step has as many places as its plan says (models/engines/vllm/patches/proposer.py).
"""

from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from models.core.drafting.eagle3_heads import (
    Eagle3,
    Format,
    MaskedParams,
    engine_weights,
    require_mask,
    start_from_last_layer,
)
from models.core.drafting.features import FeatureDrafter
from models.core.drafting.proposal import Proposal
from models.drafts import Draw, GoOn, KeepRows, Procedure, Rows, Unrolled
from models.losses import forward_kl

PAPER = "arXiv:2602.01469; github.com/vllm-project/speculators, P-EAGLE"
ARCHITECTURES = ("Eagle3LlamaForCausalLM",)
SERVED = True


class Params(MaskedParams):
    """Shape of a new head."""

    name: Literal["parallel_eagle"] = "parallel_eagle"
    retention: float = Field(
        0.7, gt=0, le=1, description="share of a place's rows that are trained at the next place too."
    )
    least_retention: float = Field(0.2, ge=0, le=1, description="share of all rows that every place is trained on.")

    def more(self, vocab_size: int) -> dict[str, Any]:
        return {
            "ptd_token_id": self.mask(vocab_size),
            "retention": self.retention,
            "least_retention": self.least_retention,
        }


class ParallelEagle(Eagle3):
    procedure = Procedure(loss=forward_kl.Params(), follow="all", step_decay=1.0)

    def __init__(self, config: dict[str, Any]) -> None:
        """See the base; ValueError if the mask is no token of the target's."""
        super().__init__(config)
        self.mask_token_id = require_mask(config.get("ptd_token_id"), config["vocab_size"])
        self.mask_hidden = nn.Parameter(torch.empty(1, self.fc.in_features))

    def advance(self, step: int, state: Tensor, token_ids: Tensor, *rest: Any) -> Tensor:
        """See the base; from the second step on neither the state nor the token is read."""
        if step:
            state = self.combine(self.mask_hidden).expand(len(state), -1)
            token_ids = torch.full_like(token_ids, self.mask_token_id)
        return super().advance(step, state, token_ids, *rest)

    def unroll(self, rows: Rows, num_steps: int, keep: KeepRows | None = None) -> list[Unrolled]:
        """See `models.drafts.Draft`; with `rows.rng`, in training, a share of the rows goes on."""
        if (rng := rows.rng) is None:
            return super().unroll(rows, num_steps, keep)

        def sampled(step: int, running: Tensor, logits: Tensor) -> Tensor:
            share = max(self.config["retention"] ** (step + 1), self.config["least_retention"])
            num_kept = min(len(running), max(1, round(share * len(rows.index))))
            kept = torch.zeros(len(running), dtype=torch.bool, device=running.device)
            kept[torch.randperm(len(running), generator=rng, device=running.device)[:num_kept]] = True
            return kept if keep is None else kept & keep(step, running, logits)

        return super().unroll(rows, num_steps, sampled)

    def say_all(self, state: Tensor, last: Tensor, keys: Tensor, values: Tensor, num_tokens: int) -> Tensor:
        """Draft K places in one pass, as logits [K, D].

        `state` [1, H] are the combined states of the token before `last` [1], the last certain one; `keys` and `values`
        [T, kv heads, width] are of the first unroll, up to `state`.
        """
        state = torch.cat([state, self.combine(self.mask_hidden).expand(num_tokens - 1, -1)])
        joined = self.join(state, functional.pad(last, (0, num_tokens - 1), value=self.mask_token_id))
        positions = torch.arange(len(keys) - 1, len(keys) - 1 + num_tokens, device=last.device)
        own = self.keys_values(joined[1:], positions[1:])
        keys, values = (torch.cat(pair) for pair in zip((keys, values), own, strict=True))
        queries = self.project(self.layer["self_attn"], "q", joined, positions)
        seen = torch.arange(len(keys), device=last.device) <= positions[:, None]
        queries, keys, values = (heads.transpose(0, 1)[None] for heads in (queries, keys, values))
        attended = functional.scaled_dot_product_attention(queries, keys, values, seen, enable_gqa=True)
        attended = self.layer["self_attn"]["o_proj"](attended[0].transpose(0, 1).flatten(1))
        return self.say(self.feed_forward(self.layer, self.residual(state, joined) + attended))[1]

    def drafter(self, max_len: int) -> "_Drafter":
        return _Drafter(self, max_len)


class _Drafter(FeatureDrafter):
    """See the base; what follows a node hangs on its depth alone."""

    draft: ParallelEagle
    _logits: Tensor  # [K, D] of as many places as were asked for since the last certain token

    def extend(self, token_ids: Tensor, hidden: Tensor) -> None:
        super().extend(token_ids, hidden)
        self._logits = torch.empty(0)

    def propose(self, num_tokens: int, draw: Draw, go_on: GoOn | None = None) -> Proposal:
        self._reach(num_tokens)
        return super().propose(num_tokens, draw, go_on)

    def _after(self, paths: Any) -> Tensor:
        depths = [len(path) for path in paths]
        self._reach(max(depths) + 1)
        return self._logits[depths]

    def _reach(self, num_tokens: int) -> None:
        if len(self._logits) < num_tokens or self._run_by is not self.draft:
            keys, values = self._keys[0, : self._length], self._values[0, : self._length]
            self._logits = self.draft.say_all(self._state, self._last, keys, values, num_tokens)
            self._run_by = self.draft


_format = Format("parallel_eagle", ARCHITECTURES, ParallelEagle, start_from_last_layer)
renew, save, load, check = _format.renew, _format.save, _format.load, _format.check
vllm_weights, require_target = engine_weights, _format.require_target


def create(params: Params, target_dir: Path, token_counts: np.ndarray) -> ParallelEagle:
    """See `models.core.drafting.eagle3_heads.Format.create`; h* starts as noise, the same each time."""
    head = _format.create(params, target_dir, token_counts)
    vector = torch.randn(1, head.fc.in_features, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        head.mask_hidden.copy_(vector)
    return head


def vllm_config(directory: Path) -> dict[str, Any]:
    return {"method": "eagle3", "model": str(directory), "parallel_drafting": True}
