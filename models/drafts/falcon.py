"""Falcon: a semi-autoregressive head, each pass of which drafts the next k tokens, as features of the target.

    x(t)           = LSTM [E(token t+1); f(t)] ≤ t
    f̂(t+1) … f̂(t+k) = layer of x(t−k+1) … x(t), each of which sees all x ≤ t
    q              = softmax(W_out f̂)

f is what the target's output matrix W_out multiplies, as in EAGLE; index j of a pass goes k features on instead of one.
The next pass reads the k features that this one made and the k tokens that were drafted from them. So what follows a
token of a pass is the same for all its siblings, and a tree takes one pass for k levels of nodes.

Trained by coupled sequential glancing distillation. A step cuts texts into blocks of k, which begin at a place drawn by
chance. A first pass without a gradient tells how many tokens of a text would be wrong. For a share of so many places,
0.45 when training begins and 0.1 when it ends, the true feature and token are put in the place of the input that would
have to draft them: from 1 to k − 1 of a block, from its first one on, so that the others learn to go on from them. All
places keep their loss, as in the paper's code. It is EAGLE's, with its noise; the paper takes a tenth of its
cross-entropy to the token itself.

Its code gives the LSTM the text as a batch, so that nothing is remembered there; here it runs along the text. There is
no dropout between the LSTM's two layers, and the decoder layer starts as the target's last.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from models.core.drafting.borrowing import Format, NoisyDraft
from models.core.drafting.draft_format import LAYER_SIZES
from models.core.drafting.features import Node, NodeDrafter, decoder_layer, stacked, start_as
from models.drafts import KeepRows, Procedure, Rows, Unrolled
from models.losses import feature_regression
from models.params import BaseParams

PAPER = "arXiv:2412.12639; github.com/Bestpay-inc/Falcon"
ARCHITECTURES = ("FalconDraft",)
SERVED = False
FIRST_SHARE, LAST_SHARE = 0.45, 0.1  # of wrong tokens, how many true ones are shown
# What the LSTM remembers after an input: h and c, [2, n, H] each.
KeyValues = tuple[Tensor, Tensor]


class Params(BaseParams):
    """Shape of a new draft."""

    name: Literal["falcon"] = "falcon"
    vocab_size: int = Field(4096, ge=1, description="D, at most the target's.")
    tokens_per_pass: int = Field(2, ge=1, description="k.")
    noise: float = Field(0.1, ge=0, description="features are off by up to this in training, each entry by itself.")


class Falcon(NoisyDraft):
    procedure = Procedure(loss=feature_regression.Params(), follow="all", step_decay=1.0)

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        hidden = config["hidden_size"]
        self.per_pass: int = config["tokens_per_pass"]
        self.lstm = nn.LSTM(2 * hidden, hidden, num_layers=2, batch_first=True)
        self.layers = nn.ModuleList([decoder_layer(config, hidden, ())])

    def join(self, state: Tensor, token_ids: Tensor) -> Tensor:
        return torch.cat([functional.embedding(token_ids, self.embedding), state], dim=-1)

    def residual(self, state: Tensor, joined: Tensor) -> Tensor:
        return joined

    def num_unrolled(self, num_draft_tokens: int) -> int:
        """Return k: training is of one pass, as every later one is like it."""
        return self.per_pass

    def read(self, features: Tensor, token_ids: Tensor, memory: KeyValues | None = None) -> tuple[Tensor, KeyValues]:
        """Return x [B, T, H] and what is remembered then, of features [B, T, H] and the tokens [B, T] after them."""
        read: Tensor
        read, after = self.lstm(self.join(features, token_ids), memory)
        return read, after

    def unroll(self, rows: Rows, num_steps: int, keep: KeepRows | None = None) -> list[Unrolled]:
        """See `models.drafts.Draft`; in training, with `rows.rng`, only rows that end a block run."""
        features, following = self.combine(rows.hidden), rows.token_ids[:, 1 : rows.hidden.shape[1] + 1]
        running = torch.arange(len(rows.index), device=rows.index.device)
        if (rng := rows.rng) is not None:
            running = self._block_ends(rows, rng)
            features, following = self.glance(rows, features, following, running, rng)
        read, _ = self.read(features, following)
        text = self.keys_values(read, torch.arange(read.shape[1], device=read.device))
        states = self.first_pass(read, text, rows.sequence[running], rows.index[running])
        own = tuple(one.new_zeros(len(running), 0, *one.shape[2:]) for one in text)
        memory = self._memories(features, following, rows) if num_steps > self.per_pass else None
        drafted = []
        for step in range(num_steps):
            number, place = divmod(step, self.per_pass)
            if number and not place:
                start = rows.index[running] + 1 + step - self.per_pass
                places = start[:, None] + torch.arange(self.per_pass, device=start.device)
                tokens = rows.token_ids[rows.sequence[running, None], places + 1]
                states, own, memory = self.next_pass(
                    states, tokens, places, own, memory, rows.sequence[running], rows.index[running], text
                )
            hidden, logits = self.say(states[:, place])
            drafted.append(Unrolled(running, logits, hidden))
            if keep is not None and step + 1 < num_steps:
                going = keep(step, running, logits)
                running, states, own = running[going], states[going], tuple(one[going] for one in own)
                memory = None if memory is None else (memory[0][:, going], memory[1][:, going])
        return drafted

    def first_pass(self, read: Tensor, text: tuple[Tensor, Tensor], sequence: Tensor, index: Tensor) -> Tensor:
        """Return features [n, k, H] that follow rows [n] of x [B, T, H], whose keys and values `text` is."""
        places = index[:, None] + torch.arange(1 - self.per_pass, 1, device=index.device)
        block = read[sequence[:, None], places.clamp(min=0)]
        own = tuple(one.new_zeros(len(index), 0, *one.shape[2:]) for one in text)
        return self._pass(block, places, own, sequence, index, text)

    def next_pass(
        self,
        features: Tensor,
        token_ids: Tensor,
        places: Tensor,
        own: Any,
        memory: Any,
        sequence: Tensor,
        index: Tensor,
        text: tuple[Tensor, Tensor],
    ) -> tuple[Tensor, Any, KeyValues]:
        """Go on from what a pass drafted: features [n, k, H] that follow, and `own` and `memory` with these in them.

        `features` [n, k, H] are what it made, at `places` [n, k], `token_ids` [n, k] what was drafted from them,
        `own` keys and values [n, m, kv heads, width] of what was drafted before, `memory` what the LSTM remembered
        then; the rest is as in `attend`.
        """
        block, memory = self.read(features, token_ids, memory)
        new = self.keys_values(block, places)
        own = tuple(torch.cat(pair, dim=1) for pair in zip(own, new, strict=True))
        return self._pass(block, places, own, sequence, index, text), own, memory

    def _pass(
        self, block: Tensor, places: Tensor, own: Any, sequence: Tensor, index: Tensor, text: tuple[Tensor, Tensor]
    ) -> Tensor:
        attention = self.layer["self_attn"]
        queries = self.rotated(attention["q_proj"](block), self.num_heads, places)
        attended = self.attend(queries, own, sequence, index, text)
        return self.feed_forward(self.layer, block + attention["o_proj"](attended))

    def glance(
        self, rows: Rows, features: Tensor, following: Tensor, ends: Tensor, rng: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """Put truth in the place of some of the features [B, T, H], without noise, and of the tokens [B, T] after them.
        `ends` are the row numbers that end a block. Returns both, with noise on features that are not of the truth."""
        noisy = self.noise(features, rng)
        sequence, index = rows.sequence[ends], rows.index[ends]
        last = torch.zeros(len(features), dtype=index.dtype, device=index.device)
        last.scatter_reduce_(0, rows.sequence, rows.index, "amax")
        with torch.no_grad():
            read, _ = self.read(noisy, following)
            text = self.keys_values(read, torch.arange(read.shape[1], device=read.device))
            said = self.vocabulary[self.say(self.first_pass(read, text, sequence, index))[1].argmax(-1)]
        steps = torch.arange(self.per_pass, device=index.device)
        came = rows.token_ids[sequence[:, None], index[:, None] + 2 + steps]
        num_known = (last[sequence] - index + 1).clamp(max=self.per_pass)
        wrong = ((said != came) & (steps < num_known[:, None])).sum(-1)
        share = FIRST_SHARE + (LAST_SHARE - FIRST_SHARE) * min(rows.done, 1.0)
        left = (share * torch.zeros(len(features), device=index.device).index_add(0, sequence, wrong.float())).tolist()
        shown, shown_tokens = noisy.clone(), following.clone()
        lengths = torch.randint(1, max(self.per_pass, 2), ends.shape, generator=rng, device=index.device)
        lengths = lengths.minimum(num_known.clamp(max=self.per_pass - 1))
        order = torch.randperm(len(ends), generator=rng, device=index.device)
        for number, end, length in torch.stack([sequence, index, lengths], dim=1)[order].tolist():
            if end - self.per_pass + 1 < 0 or left[number] < length:
                continue
            left[number] -= length
            given = slice(end - self.per_pass + 1, end - self.per_pass + 1 + length)
            shown[number, given] = features[number, end + 1 : end + 1 + length]
            shown_tokens[number, given] = rows.token_ids[number, end + 2 : end + 2 + length]
        return shown, shown_tokens

    def _block_ends(self, rows: Rows, rng: torch.Generator) -> Tensor:
        """Return the row numbers that end a block, if one ends at a row that is drawn."""
        drawn = torch.randint(len(rows.index), (1,), generator=rng, device=rows.index.device)
        return ((rows.index - rows.index[drawn]) % self.per_pass == 0).nonzero()[:, 0]

    def _memories(self, features: Tensor, token_ids: Tensor, rows: Rows) -> KeyValues:
        after: KeyValues | None = None
        kept = []
        for place in range(int(rows.index.max()) + 1):
            _, after = self.read(features[:, place : place + 1], token_ids[:, place : place + 1], after)
            kept.append(torch.stack(after))
        found = torch.stack(kept)[rows.index, :, :, rows.sequence].permute(1, 2, 0, 3)
        return found[0].contiguous(), found[1].contiguous()

    def drafter(self, max_len: int) -> "_Drafter":  # type: ignore[override]  # it drafts otherwise
        return _Drafter(self, max_len)


class _Drafter(NodeDrafter):
    """See the base; a node's state is [k, H], its memory h and c, [2, H] each."""

    draft: Falcon

    def __init__(self, draft: Falcon, max_len: int) -> None:
        super().__init__(draft)
        self.per_pass = draft.per_pass
        shape = (1, max_len, draft.num_kv_heads, draft.head_dim)
        self._text = tuple(torch.empty(shape, device=draft.embedding.device) for _ in range(2))
        self._read = torch.empty(1, max_len, draft.config["hidden_size"], device=draft.embedding.device)
        self._length = 0
        self._memory: KeyValues | None = None

    def extend(self, token_ids: Tensor, hidden: Tensor) -> None:
        start, stop = self._length, self._length + len(hidden)
        features = self.draft.combine(hidden[None].float())
        read, self._memory = self.draft.read(features, token_ids[None, 1:], self._memory)
        new = self.draft.keys_values(read, torch.arange(start, stop, device=hidden.device))
        self._read[:, start:stop] = read
        for held, part in zip(self._text, new, strict=True):
            held[:, start:stop] = part
        self._length, self._nodes = stop, {}

    def _run(self, level: Sequence[tuple[int, ...]]) -> None:
        draft, size = self.draft, self.per_pass
        text = (self._text[0][:, : self._length], self._text[1][:, : self._length])
        device = self._read.device
        row = torch.zeros(len(level), dtype=torch.int64, device=device)
        index = row + self._length - 1
        if depth := len(level[0]):
            above = [self._nodes[path[:-size]] for path in level]
            tokens = torch.tensor([path[-size:] for path in level], device=device)
            places = index[:, None] + 1 + depth - size + torch.arange(size, device=device)
            own: Any = stacked(node.own for node in above)
            memory: Any = tuple(torch.stack(one, dim=1) for one in zip(*(node.memory for node in above), strict=True))
            states = torch.stack([node.state for node in above])
            states, own, memory = draft.next_pass(states, tokens, places, own, memory, row, index, text)
        else:
            states, memory = draft.first_pass(self._read, text, row, index), self._memory
            own = tuple(one[:, :0] for one in text)
        logits = draft.say(states)[1]
        for number, path in enumerate(level):
            h, c = memory
            kept = (h[:, number], c[:, number])
            self._nodes[path] = Node(states[number], logits[number], tuple(one[number] for one in own), kept)


_format = Format("falcon", ARCHITECTURES, Falcon, (*LAYER_SIZES, "tokens_per_pass"))
renew, save, load, check = _format.renew, _format.save, _format.load, _format.check
vllm_config, vllm_weights = _format.vllm_config, _format.vllm_weights


def create(params: Params, target_dir: Path, token_counts: np.ndarray) -> Falcon:
    """Make a draft whose layer is the target's last, with an LSTM of chance values, the same each time; see
    `models.drafts.Family`."""
    own = {"feature_noise": params.noise, "tokens_per_pass": params.tokens_per_pass}
    draft = _format.start(params.vocab_size, own, target_dir, token_counts)
    rng, bound = torch.Generator().manual_seed(0), draft.config["hidden_size"] ** -0.5
    with torch.no_grad():
        for parameter in draft.lstm.parameters():
            parameter.uniform_(-bound, bound, generator=rng)
        start_as(draft.layer, target_dir, draft.num_target_layers - 1)
    return draft
