"""The three layers of a DREAM draft, how they read a text and its images, and how they draft.

An image is a run of image tokens. It is scored by the token that comes after it, as soon as the target has read that:
what it looks at most is kept, and rows of later tokens don't see the rest. What saw the rest before stays as it is.

Letters beyond those of `models.drafts`: m tokens of a text that layers 0 and 2 hold, n rows of a pass, u tokens that a
row has drafted.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from models.core.drafting.borrowing import NoisyDraft
from models.core.drafting.drafters import require_width
from models.core.drafting.features import Node, NodeDrafter, Scale, decoder_layer, stacked
from models.drafts import KeepRows, Procedure, Rows, Unrolled
from models.drafts.dream import watched
from models.losses import feature_regression

CHUNK = 512
NEVER = torch.iinfo(torch.int64).max
Pair = tuple[Tensor, Tensor]  # keys and values
Pairs = list[Pair]  # of each layer


class DreamCache(NamedTuple):
    """What a draft knows of B texts of T tokens, of which layers 0 and 2 hold m."""

    places: Tensor  # [m] where these stand
    gone: Tensor  # [B, m] the place from which rows see each no more
    text: Pairs  # keys and values [B, ·, kv heads, width] of each layer; layer 1 has all T
    images: Tensor  # [B, T] whether a token is an image's
    keys: Tensor  # [B, T, kv heads, width] that the target's last watched layer looks at; none without images


class Dream(NoisyDraft):
    max_unroll = 1  # in training every step reads the target's features
    procedure = Procedure(loss=feature_regression.Params(classification=5.0), follow="all", step_decay=1.0)

    def __init__(self, config: dict[str, Any]) -> None:
        """See the base; ValueError if layers or image tokens are none of the target's."""
        super().__init__(config)
        self.middle = watched.require_layers(config.get("middle_layers"))
        self.image_tokens = require_tokens(config.get("image_tokens"), config["vocab_size"])
        width = config["hidden_size"]
        cross = decoder_layer(config, width, head_norms=True)
        self.layers = nn.ModuleList([decoder_layer(config, width, ()), cross, decoder_layer(config, width)])
        self.gates = nn.Parameter(torch.zeros(2))
        self.norm = Scale(width)
        self.watched = nn.ModuleList()

    def borrow(self, target_dir: Path) -> Self:
        """See the base; ValueError if the target has not the layers that are watched."""
        super().borrow(target_dir)
        if self.middle[-1] >= self.num_target_layers:
            raise ValueError(f"middle_layers must be within 0 to {self.num_target_layers - 1}; got {list(self.middle)}")
        self.watched = watched.watch(target_dir, self.middle, self.num_heads, self.num_kv_heads, self.eps)
        return self

    @property
    def watchers(self) -> list[watched.Watched]:
        return cast("list[watched.Watched]", list(self.watched))

    @property
    def taps(self) -> tuple[int, ...]:
        return (*self.middle, self.num_target_layers)

    @property
    def layer(self) -> Any:
        return self.layers[2]

    def combine(self, hidden: Tensor) -> Tensor:
        width = len(self.target_norm)
        require_width(self, hidden, len(self.taps) * width)
        return super().combine(hidden[..., -width:])

    def start(self, num_texts: int) -> DreamCache:
        """Return what is known before anything is read."""
        none = self.embedding.new_empty(num_texts, 0, self.num_kv_heads, self.head_dim)
        flags = torch.empty(num_texts, 0, dtype=torch.int64, device=none.device)
        return DreamCache(flags[0], flags, [(none, none)] * 3, flags.bool(), none)

    def read(
        self, memory: DreamCache, hidden: Tensor, token_ids: Tensor, rng: torch.Generator | None = None
    ) -> tuple[DreamCache, Tensor]:
        """Read on in B texts: tapped states [B, n, A·H] of the next tokens, and these [B, n+1] with the one after them.
        `rng` is of training's noise. Returns what is known then, and c [B, n, H]."""
        num_texts, num_tokens = hidden.shape[:2]
        features = self.combine(hidden)
        if rng is not None:
            features = self.noise(features, rng)
        start = memory.images.shape[1]
        places = torch.arange(start, start + num_tokens, device=hidden.device)
        memory = self._look(memory, hidden, token_ids[:, :-1], places)
        embedded = functional.embedding(token_ids[:, 1:], self.embedding)
        of_text = list(memory.text)
        for number, source in ((0, embedded), (1, features)):
            of_text[number] = joined(of_text[number], self.keys_values_of(number, source, places))
        sequence = torch.arange(num_texts, device=hidden.device).repeat_interleave(num_tokens)
        index = places.repeat(num_texts)
        seen = self.seen(memory, sequence, index)
        none = self.no_own(len(index))
        state = embedded.flatten(0, 1)
        for number in (0, 1):
            state = self.run(number, state, index, none[number], sequence, of_text[number], seen[number])
        fused = state.unflatten(0, (num_texts, num_tokens))
        of_text[2] = joined(of_text[2], self.keys_values_of(2, fused, places))
        return memory._replace(text=of_text), fused

    def _look(self, memory: DreamCache, hidden: Tensor, token_ids: Tensor, places: Tensor) -> DreamCache:
        """Take in which of the next tokens [B, n] are an image's, and judge the images that have ended."""
        found = torch.zeros_like(token_ids, dtype=torch.bool)
        held = torch.cat([memory.places, places])
        gone = torch.cat([memory.gone, torch.full_like(token_ids, NEVER)], dim=1)
        if (tokens := self.image_tokens) is None:
            return memory._replace(places=held, gone=gone, images=torch.cat([memory.images, found], dim=1))
        found = (token_ids >= tokens[0]) & (token_ids <= tokens[1])
        flags = torch.cat([memory.images, found], dim=1)
        width, number = len(self.target_norm), len(self.middle) - 1
        with torch.no_grad():
            stream = hidden[..., number * width : (number + 1) * width].float()
            queries, new = self.watchers[number].project(stream, places, self.rotated)
            keys = torch.cat([memory.keys, new], dim=1)
            for text, row in enumerate(flags.tolist()):
                for first, after in ended(row, int(places[0])):
                    scores = watched.looked_at(queries[text, after - int(places[0])], keys[text, first:after])
                    dropped = first + left_out(scores, self.config["image_share"])
                    # A token is embedded one place before its own, beside the feature that it follows.
                    gone[text] = torch.where(torch.isin(held + 1, dropped), after, gone[text])
        return memory._replace(places=held, gone=gone, images=flags, keys=keys)

    def pruned(self, memory: DreamCache) -> DreamCache:
        """Return the memory of one text without what no later row sees."""
        kept = memory.gone[0] >= memory.images.shape[1]
        first, cross, last = memory.text
        text = [(first[0][:, kept], first[1][:, kept]), cross, (last[0][:, kept], last[1][:, kept])]
        return memory._replace(places=memory.places[kept], gone=memory.gone[:, kept], text=text)

    def seen(self, memory: DreamCache, sequence: Tensor, index: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return what rows [n] see of a text in each layer, [n, m] or [n, T]."""
        held = (memory.places <= index[:, None]) & (index[:, None] < memory.gone[sequence])
        features = torch.arange(memory.images.shape[1], device=index.device) <= index[:, None]
        return held, features, held

    def no_own(self, num_rows: int) -> Pairs:
        """Return the keys and values [n, 0, kv heads, width] of rows that have drafted nothing."""
        none = self.embedding.new_empty(num_rows, 0, self.num_kv_heads, self.head_dim)
        return [(none, none)] * 3

    def keys_values_of(self, number: int, source: Tensor, places: Tensor) -> Pair:
        """Return keys and values […, kv heads, width] of a layer, of what it reads […, H] at `places`."""
        layer: Any = self.layers[number]
        read = self.normed(source, layer["input_layernorm"]) if number == 2 else source
        keys, values = (layer["self_attn"][name](read) for name in ("k_proj", "v_proj"))
        values = values.unflatten(-1, (self.num_kv_heads, self.head_dim))
        if number == 1:
            return self.normed(keys.unflatten(-1, values.shape[-2:]), layer["self_attn"]["k_norm"]), values
        return self.rotated(keys, self.num_kv_heads, places), values

    def run(
        self, number: int, state: Tensor, places: Tensor, own: Pair, sequence: Tensor, text: Pair, seen: Tensor
    ) -> Tensor:
        """Run a layer for rows [n, H] at places [n].

        `own` are keys and values [n, u, kv heads, width] of each row alone, `text` [B, ·, kv heads, width] of its
        text by `sequence` [n], of which rows are contiguous; `seen` [n, ·] says which of these a row sees.
        """
        layer: Any = self.layers[number]
        attention = layer["self_attn"]
        queries = attention["q_proj"](self.normed(state, layer["input_layernorm"]) if number else state)
        if number == 1:
            queries = self.normed(queries.unflatten(-1, (self.num_heads, self.head_dim)), attention["q_norm"])
        else:
            queries = self.rotated(queries, self.num_heads, places)
        attended = attention["o_proj"](self.attend(queries[:, None], own, sequence, places, text, seen)[:, 0])
        if number != 1:
            return self.feed_forward(layer, state + attended)
        on_attention, on_mlp = self.gates.tanh()
        state = state + on_attention * attended
        fused: Tensor = state + on_mlp * (self.feed_forward(layer, state) - state)
        return fused

    def draft_first(self, fused: Tensor, index: Tensor, sequence: Tensor, memory: DreamCache) -> tuple[Tensor, Tensor]:
        """Return f̂ [n, H] and logits [n, D] that follow c [n, H] of rows at `index`."""
        seen = self.seen(memory, sequence, index)[2]
        return self.speak(self.run(2, fused, index, self.no_own(len(index))[2], sequence, memory.text[2], seen))

    def go_on(
        self,
        guess: Tensor,
        token_ids: Tensor,
        step: int,
        own: Pairs,
        index: Tensor,
        sequence: Tensor,
        memory: DreamCache,
    ) -> tuple[Tensor, Tensor, Pairs]:
        """Go on from what was drafted: f̂ [n, H], logits [n, D], and `own` with these tokens in it.

        `guess` [n, H] is f̂ of the last tokens but one, `token_ids` [n] are the last, `step` is how many were
        drafted, these among them; `own` are keys and values of those before, `index` and `sequence` [n] as in
        `Rows`.
        """
        state = functional.embedding(token_ids, self.embedding)
        places, seen, after = index + step, self.seen(memory, sequence, index), list(own)
        for number in range(3):
            new = self.keys_values_of(number, guess if number == 1 else state, places)
            after[number] = joined(own[number], (new[0][:, None], new[1][:, None]))
            state = self.run(number, state, places, after[number], sequence, memory.text[number], seen[number])
        return *self.speak(state), after

    def speak(self, state: Tensor) -> tuple[Tensor, Tensor]:
        """[n, H] the last layer's output → f̂ [n, H] and logits [n, D]."""
        return super().say(self.normed(state, self.norm))

    def unroll(self, rows: Rows, num_steps: int, keep: KeepRows | None = None) -> list[Unrolled]:
        following = rows.token_ids[:, : rows.hidden.shape[1] + 1]
        memory, fused = self.read(self.start(len(following)), rows.hidden, following, rows.rng)
        running, own = torch.arange(len(rows.index), device=rows.index.device), self.no_own(len(rows.index))
        read = fused[rows.sequence, rows.index]
        guess, logits = self.draft_first(read, rows.index, rows.sequence, memory)
        added = None if rows.rng is None else self.config["middle_weight"] * self.distance(read, rows)
        drafted = [Unrolled(running, logits, guess, added)]
        for step in range(1, num_steps):
            going = torch.ones_like(running, dtype=torch.bool) if keep is None else keep(step - 1, running, logits)
            running, guess = running[going], guess[going]
            own = [(keys[going], values[going]) for keys, values in own]
            sequence, index = rows.sequence[running], rows.index[running]
            tokens = rows.token_ids[sequence, index + 1 + step]
            guess, logits, own = self.go_on(guess, tokens, step, own, index, sequence, memory)
            drafted.append(Unrolled(running, logits, guess))
        return drafted

    def distance(self, fused: Tensor, rows: Rows) -> Tensor:
        """Return [n] how far c [n, H] of rows is from the intermediate feature of the token that it knows last."""
        streams = self.chosen(rows.hidden)[rows.sequence, rows.index + 1]
        own, wanted = (functional.rms_norm(one, one.shape[-1:], eps=self.eps) for one in (fused, streams))
        return functional.smooth_l1_loss(own, wanted, reduction="none").mean(-1)

    @torch.no_grad()
    def chosen(self, hidden: Tensor) -> Tensor:
        """Return the stream [B, T, H] of tapped states [B, T, A·H] whose layer looks with the least entropy."""
        streams = hidden.float().unflatten(-1, (len(self.taps), -1))[:, :, :-1]
        places = torch.arange(hidden.shape[1], device=hidden.device)
        entropies = []
        for number, layer in enumerate(self.watchers):
            queries, keys = layer.project(streams[:, :, number], places, self.rotated)
            entropies.append(
                torch.stack([watched.entropy(watched.weights(*one)) for one in zip(queries, keys, strict=True)])
            )
        least = torch.stack(entropies).argmin(0)
        found: Tensor = streams.gather(2, least[..., None, None].expand(*least.shape, 1, streams.shape[-1]))[:, :, 0]
        return found

    def drafter(self, max_len: int) -> "_Drafter":  # type: ignore[override]  # it drafts otherwise
        return _Drafter(self)


class _Drafter(NodeDrafter):
    """See the base; a node's state is f̂."""

    draft: Dream

    def __init__(self, draft: Dream) -> None:
        super().__init__(draft)
        self._memory = draft.start(1)
        self._fused = torch.empty(0)

    def extend(self, token_ids: Tensor, hidden: Tensor) -> None:
        for start in range(0, len(hidden), CHUNK):
            part = hidden[None, start : start + CHUNK].float()
            tokens = token_ids[None, start : start + part.shape[1] + 1]
            memory, fused = self.draft.read(self._memory, part, tokens)
            self._memory, self._fused = self.draft.pruned(memory), fused[0, -1:]
        self._nodes = {}

    def _run(self, level: Sequence[tuple[int, ...]]) -> None:
        draft, memory, step = self.draft, self._memory, len(level[0])
        sequence = torch.zeros(len(level), dtype=torch.int64, device=self._fused.device)
        index, own = sequence + memory.images.shape[1] - 1, draft.no_own(len(level))
        if step:
            above = [self._nodes[path[:-1]] for path in level]
            tokens = torch.tensor([path[-1] for path in level], device=index.device)
            guess = torch.stack([node.state for node in above])
            own = [stacked(pairs) for pairs in zip(*(node.own for node in above), strict=True)]
            guess, logits, own = draft.go_on(guess, tokens, step, own, index, sequence, memory)
        else:
            guess, logits = draft.draft_first(self._fused, index, sequence, memory)
        for row, path in enumerate(level):
            self._nodes[path] = Node(guess[row], logits[row, None], [(keys[row], values[row]) for keys, values in own])


def joined(before: Pair, new: Pair) -> Pair:
    """Put keys and values behind others, along axis 1."""
    return torch.cat([before[0], new[0]], dim=1), torch.cat([before[1], new[1]], dim=1)


def ended(images: Sequence[bool], start: int) -> Iterator[tuple[int, int]]:
    """Yield (first, place after the last) of the runs of images that end before a place from `start` on."""
    first: int | None = None
    for place, image in enumerate(images):
        if image and first is None:
            first = place
        elif not image and first is not None:
            if place >= start:
                yield first, place
            first = None


def left_out(scores: Tensor, share: float) -> Tensor:
    """Return the places [·] of tokens that are not of the `share`, one at least, with the highest `scores` [n]."""
    return scores.argsort(descending=True, stable=True)[max(1, int(len(scores) * share)) :]


def require_tokens(tokens: Any, vocab_size: int) -> tuple[int, int] | None:
    """Return the first and the last image token; ValueError if they are no range of the target's."""
    if tokens is None:
        return None
    numbers = isinstance(tokens, list) and all(type(one) is int for one in tokens)
    if not numbers or len(tokens) != 2 or not 0 <= tokens[0] <= tokens[1] < vocab_size:
        raise ValueError(f"image_tokens must be the first and the last of 0 to {vocab_size - 1}; got {tokens}")
    return tokens[0], tokens[1]
