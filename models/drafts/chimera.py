"""Chimera: a trigram of tokens asks the target's own states for all that came before; a head each place speaks.

    x(t)      = g + SiLU(W₂ g),   g = R e + SiLU(W₁ e),   e = [E(t); E(t−1); E(t−2)]          trigram encoder
    f̂(t+k)    = layer(x(t+k) | f(1) … f(t), f̂(t+1) … f̂(t+k−1), x(t+k))                        full context encoder
    q_k       = softmax(U_k [f̂(t+k); f(t)])                                                   residual decoding head k

f(t) is what the target's output matrix multiplies, t+1 the last certain token, E the target's input embedding. The
layer reads no text: its keys and values are of the target's features. x stands only for tokens that the target has not
read.

As in the paper and its code: what the layer makes is to be the feature by squared distance, beside the cross-entropy to
the token that came, every head alike and on every row; the keys of a drafted token are of its guessed feature. The
paper's encoder has the two products W₁ and W₂; the residuals around them are its code's. Where training there lets a
trigram see those before it, drafting does not, and neither does this. Here the layer starts as the target's last, U_k
as the target's output matrix for f̂ and nothing for f, of the commonest tokens, and R by chance, the same each time.
"""

from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from models.core.checkpoints.readout import output_embedding
from models.core.drafting.borrowing import BorrowingDraft, Format
from models.core.drafting.draft_format import LAYER_SIZES
from models.core.drafting.features import FeatureDrafter, decoder_layer, linear, start_as
from models.core.drafting.heads import Block
from models.core.layers.kernels import Borrowed
from models.drafts import Procedure, Rows
from models.losses import feature_l2
from models.params import BaseParams

PAPER = "arXiv:2402.15758; github.com/kafkayu/Chimera"
ARCHITECTURES = ("ChimeraDraft",)
SERVED = False


class Params(BaseParams):
    """Shape of a new draft."""

    name: Literal["chimera"] = "chimera"
    vocab_size: int = Field(4096, ge=1, description="D, at most the target's.")
    num_heads: int = Field(4, ge=1, description="K, the most tokens that are drafted one after the other.")


class Chimera(BorrowingDraft):
    """The draft; parameters carry the names of the checkpoint.

    Between two steps it hands on, side by side, [n, 4 H]: f(t) or its last guess, the embeddings of its token and of
    the token before, and f(t).
    """

    procedure = Procedure(loss=feature_l2.Params(), follow="all", step_decay=1.0)

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        width = config["hidden_size"]
        self.max_depth = config["num_heads"]
        self.trigram = Block(3 * width, width, 2)
        self.layers = nn.ModuleList([decoder_layer(config, width)])
        self.heads = nn.ModuleList(linear(2 * width, config["draft_vocab_size"]) for _ in range(config["num_heads"]))

    def borrow(self, target_dir: Path) -> Self:
        super().borrow(target_dir)
        self.output = Borrowed(torch.empty(0))
        return self

    def num_unrolled(self, num_draft_tokens: int) -> int:
        """Return K: a tree may have more nodes than heads, so how many are served does not tell which heads are."""
        return len(self.heads)

    def begin(self, rows: Rows, combined: Tensor) -> Tensor:
        read = torch.stack([rows.index, rows.index - 1], dim=1)
        embedded = functional.embedding(rows.token_ids[rows.sequence[:, None], read.clamp(min=0)], self.embedding)
        feature = super().begin(rows, combined)
        return torch.cat([feature, (embedded * (read >= 0)[..., None]).flatten(1), feature], dim=-1)

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
        """The trigram that `token_ids` end asks; the keys that it leaves are of the feature before it."""
        guessed, last, before, feature = state.chunk(4, dim=-1)
        embedded = functional.embedding(token_ids, self.embedding)
        read = self.trigram(torch.cat([embedded, last, before], dim=-1))
        if step > 0:
            own.append(self.keys_values(self.join(guessed, token_ids), index + step))
        joined, place = self.join(read, token_ids), index + 1 + step
        seen = zip(*own, self.keys_values(joined, place), strict=True)
        own_keys, own_values = (torch.stack(one, dim=1) for one in seen)
        queries = self.rotated(self.layer["self_attn"]["q_proj"](joined), self.num_heads, place)
        attended = self.attend(queries[:, None], (own_keys, own_values), sequence, index, (keys, values))[:, 0]
        added = self.layer["self_attn"]["o_proj"](attended)
        made = self.feed_forward(self.layer, self.residual(read, joined) + added)
        return torch.cat([made, embedded, last, feature], dim=-1)

    def say(self, state: Tensor, step: int = 0) -> tuple[Tensor, Tensor]:
        guessed, *_, feature = state.chunk(4, dim=-1)
        return guessed, self.heads[step](torch.cat([guessed, feature], dim=-1))

    def drafter(self, max_len: int) -> "_Drafter":
        return _Drafter(self, max_len)


class _Drafter(FeatureDrafter):
    """See the base; it remembers a token more, as a trigram may begin before what is taken in."""

    draft: Chimera

    def __init__(self, draft: Chimera, max_len: int) -> None:
        super().__init__(draft, max_len)
        self._before = torch.empty(0, dtype=torch.int64, device=draft.embedding.device)

    def extend(self, token_ids: Tensor, hidden: Tensor) -> None:
        super().extend(token_ids, hidden)
        read = torch.cat([self._before, token_ids])[-3:-1]
        embedded = functional.embedding(read.flip(0), self.draft.embedding)
        embedded = functional.pad(embedded, (0, 0, 0, 2 - len(read))).reshape(1, -1)
        self._state = torch.cat([self._state, embedded, self._state], dim=-1)
        self._before = read[-1:]


_format = Format("chimera", ARCHITECTURES, Chimera, (*LAYER_SIZES, "num_heads"))
save, load, check = _format.save, _format.load, _format.check
vllm_config, vllm_weights = _format.vllm_config, _format.vllm_weights


def create(params: Params, target_dir: Path, token_counts: np.ndarray) -> Chimera:
    """Make a draft whose layer is the target's last, with a trigram encoder of chance values; see
    `models.drafts.Family`."""
    draft = _format.start(params.vocab_size, {"num_heads": params.num_heads}, target_dir, token_counts)
    width = draft.config["hidden_size"]
    rng, bound = torch.Generator().manual_seed(0), (3 * width) ** -0.5
    with torch.no_grad():
        start_as(draft.layer, target_dir, draft.num_target_layers - 1)
        draft.trigram.pass_through()
        for parameter in draft.trigram.residual.parameters():
            parameter.uniform_(-bound, bound, generator=rng)
        said = output_embedding(target_dir)[draft.token_map]
        for parameter in draft.heads.parameters():
            parameter.copy_(torch.cat([said, torch.zeros_like(said)], dim=-1))
    return draft


def renew(draft: Chimera, target_dir: Path, token_counts: np.ndarray) -> Chimera:
    """Return the draft as it is; its vocabulary stays."""
    return draft
