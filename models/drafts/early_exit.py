"""LayerSkip's self-speculation: draft with the target's first layers, its last norm and its output matrix.

What the first layers make of a token is the same in draft and target, so they share keys and values, and the target's
pass takes up drafted tokens where the draft left them: only the last one, which the draft has not read, goes through
these layers then. It pays on targets whose early layers have learnt to speak: those finetuned with the regime
`layer_dropout`.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import Field
from torch import Tensor

from models.core.drafting.self_draft import SelfDraft, SelfFormat, after_exit
from models.core.layers.decoder import Cache, Decoder
from models.params import BaseParams
from models.targets import target_config

PAPER = "arXiv:2404.16710, section 4.2"
ARCHITECTURES = ("EarlyExitDraft",)
SERVED = False


class Params(BaseParams):
    """Where it leaves the target."""

    name: Literal["early_exit"] = "early_exit"
    exit_layer: int | None = Field(
        None, ge=1, description="E, how many of the first layers draft; by default a quarter of them."
    )


class EarlyExit(SelfDraft):
    params: Params

    def __init__(self, params: Params, config: dict[str, Any]) -> None:
        super().__init__(params, config)
        self.skipped = after_exit(params.exit_layer, config["num_hidden_layers"])

    def states(self, target: Decoder, token_ids: Tensor, starts: Sequence[int], num_tokens: int) -> Iterator[Tensor]:
        """See the base; one pass makes all, because what the first layers know of a token is the target's own."""
        made, _ = target.partial(token_ids, Cache(target, len(token_ids)), self.skipped)
        yield from (made[start : start + num_tokens] for start in starts)


_format = SelfFormat("early_exit", ARCHITECTURES, Params, EarlyExit)
renew, save, load, check = _format.renew, _format.save, _format.load, _format.check
vllm_config, vllm_weights = _format.vllm_config, _format.vllm_weights


def create(params: Params, target_dir: Path, token_counts: np.ndarray) -> EarlyExit:
    """Make a draft for a target; see `models.drafts.Family`."""
    if params.exit_layer is None:
        quarter = max(target_config(target_dir).num_hidden_layers // 4, 1)
        params = params.model_copy(update={"exit_layer": quarter})
    return _format.create(params, target_dir, token_counts)
