"""Feature drafts that say tokens with the target's own output matrix: what they borrow, and their directory.

Norm and matrix are read, never trained and never saved; of the matrix the rows of the commonest tokens, which papers
have all of and which at small sizes are most of what a pass multiplies. As they are not learnt, which ones they are can
follow the traffic.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from models.core.checkpoints.loading import choose_vocabulary, read_tensor
from models.core.checkpoints.readout import output_embedding
from models.core.drafting import draft_format
from models.core.drafting.draft_format import require_llama_layout, require_vocab_size
from models.core.drafting.drafters import require_width
from models.core.drafting.features import FeatureDraft, layer_config
from models.core.layers.kernels import Borrowed
from models.targets import target_config


class BorrowingDraft(FeatureDraft):
    """See `models.core.drafting.features.FeatureDraft`; it reads the target's last residual stream, normed."""

    target_norm: Tensor
    output: Borrowed
    token_map: Tensor

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        size = config["draft_vocab_size"]
        self.num_target_layers = 0
        self.register_buffer("target_norm", torch.ones(config["hidden_size"]), persistent=False)
        self.output = Borrowed(torch.empty(0))
        self.register_buffer("token_map", torch.arange(size), persistent=size < config["vocab_size"])

    def borrow(self, target_dir: Path) -> Self:
        self.num_target_layers = target_config(target_dir).num_hidden_layers
        self.target_norm = read_tensor(target_dir, "model.norm.weight").float()
        self.output = Borrowed(output_embedding(target_dir)[self.token_map])
        return super().borrow(target_dir)

    @property
    def vocabulary(self) -> Tensor:
        return self.token_map

    @property
    def taps(self) -> tuple[int, ...]:
        return (self.num_target_layers,)

    def combine(self, hidden: Tensor) -> Tensor:
        require_width(self, hidden, len(self.target_norm))
        return functional.rms_norm(hidden, self.target_norm.shape, self.target_norm, self.eps)

    def say(self, state: Tensor, step: int = 0) -> tuple[Tensor, Tensor]:
        return state, self.output(state)


class NoisyDraft(BorrowingDraft):
    """See the base; in training `feature_noise` of its config is on what it reads."""

    def noise(self, state: Tensor, rng: torch.Generator) -> Tensor:
        """Add what is drawn from U(−noise, noise)."""
        drawn = torch.rand(state.shape, generator=rng, device=state.device, dtype=state.dtype)
        noisy: Tensor = state + self.config["feature_noise"] * (2 * drawn - 1)
        return noisy


Kind = TypeVar("Kind", bound=BorrowingDraft)


class Format(draft_format.Format[Kind]):
    """See the base; with the functions that make such a draft, and let it follow the traffic."""

    def start(self, vocab_size: int, own: Mapping[str, Any], target_dir: Path, token_counts: np.ndarray) -> Kind:
        """Make a draft of D = `vocab_size` tokens, 0 for the target's, with what it borrows and no weights of its own.

        `own` is what else its config.json says; the rest, and ValueError, as in `models.drafts.Family.create`.
        """
        source = target_config(target_dir)
        require_llama_layout(source.model_type, self._family)
        size = vocab_size or source.vocab_size
        require_vocab_size(size, source.vocab_size)
        config = {**layer_config(source), "draft_vocab_size": size, **own}
        return Format.renew(self, self.new(config, target_dir), target_dir, token_counts)

    def renew(self, draft: Kind, target_dir: Path, token_counts: np.ndarray) -> Kind:
        """Let the draft vocabulary follow the traffic within its size."""
        draft.token_map = choose_vocabulary(token_counts, len(draft.token_map)).to(draft.token_map.device)
        return draft.borrow(target_dir)
