"""Draft & Verify's search: which set of sublayers, skipped, gives most tokens a second?

The paper decodes texts with each set and times it. Here what decoding would accept is counted on answers that are there
already, with the keys and values that decoding has, and a step's time is put together from parts that are
measured once: K passes of the draft, by the sublayers that run, and the target's pass over K + 1 rows. So one set is
not favoured over another by what else the machine did meanwhile.
"""

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.nn import functional

from models.core.drafting.self_draft import read_ahead, read_aside
from models.core.drafting.subset_search import SubsetSearch
from models.core.layers.decoder import Cache, Decoder, Sublayers

if TYPE_CHECKING:
    from models.drafts.self_skip import SelfSkip

NUM_ANSWERS = 8
REPEATS = 9


class Times(NamedTuple):
    """Seconds of the parts of a step.

    Attributes:
        attention: of a layer's attention, one row.
        mlp: of a layer's MLP, one row.
        rest: of a draft's pass without any layer: embedding, last norm and output matrix.
        target: of the target's pass that verifies.
        plain: of the target's pass where nothing is drafted.
    """

    attention: float
    mlp: float
    rest: float
    target: float
    plain: float

    def step(self, skipped: Sublayers, num_layers: int, num_draft_tokens: int) -> float:
        """Return the seconds of a step that drafts so many tokens."""
        attention = self.attention * (num_layers - len(skipped.attention))
        return num_draft_tokens * (attention + self.mlp * (num_layers - len(skipped.mlp)) + self.rest) + self.target


@torch.inference_mode()
def find(
    draft: "SelfSkip",
    target: Decoder,
    answers: Sequence[tuple[Sequence[int], Sequence[int]]],
    num_draft_tokens: int,
    num_trials: int,
    rng: torch.Generator,
    on_progress: Callable[[int, int, str], None] | None = None,
) -> Sublayers:
    """Return the best of so many sets: the draft's own, a third of them random, the rest what the search suggests.

    Of `answers`, token ids of prompt and answer, the first ones of at least two tokens are used; `on_progress` is
    called with the number of the trial, how many there are, and a word on the best one.

    Raises:
        ValueError: no answer has two tokens.
    """
    used = [(list(prompt), list(answer)) for prompt, answer in answers if prompt and len(answer) > 1][:NUM_ANSWERS]
    if not used:
        raise ValueError(f"self_skip searches on answers of at least 2 tokens; none of the {len(answers)} has as many")
    texts = [(len(prompt), torch.tensor(prompt + answer, device=target.device)) for prompt, answer in used]
    caches = []
    for start, token_ids in texts:
        caches.append(Cache(target, len(token_ids) + (len(token_ids) - start) * num_draft_tokens))
        target.forward(token_ids, caches[-1])
    times = measure_times(target, num_draft_tokens, max(caches, key=lambda cache: cache.length))
    search = SubsetSearch(len(draft.items), rng)
    best, most = draft.skipped, 0.0
    for trial in range(num_trials):
        skipped = draft.skipped
        if trial:
            skipped = draft.as_sublayers(search.random() if trial <= num_trials // 3 else search.promising())
        steps = [
            num_accepted(target, token_ids, start, cache, skipped, num_draft_tokens)
            for (start, token_ids), cache in zip(texts, caches, strict=True)
        ]
        tau = 1 + sum(map(sum, steps)) / sum(map(len, steps))
        tokens_per_s = tau / times.step(skipped, target.num_layers, num_draft_tokens)
        search.note(draft.as_subset(skipped), tokens_per_s)
        if tokens_per_s > most:
            best, most = skipped, tokens_per_s
        if on_progress is not None:
            without = f"{1 / times.plain:.1f} without a draft"
            on_progress(trial + 1, num_trials, f"{most:.1f} tokens/s expected of the best, {without}")
    return best


def num_accepted(
    target: Decoder, token_ids: torch.Tensor, start: int, cache: Cache, skipped: Sublayers, num_draft_tokens: int
) -> list[int]:
    """Return how many tokens each step of decoding an answer greedily would accept.

    `token_ids` [T] are prompt and answer, which begins at `start`; `cache` is of all of them, with room for K times the
    answer.
    """
    starts = range(start, len(token_ids) - 1)
    fed = functional.pad(token_ids, (0, num_draft_tokens))
    said = target.logits(read_ahead(target, fed, cache, starts, num_draft_tokens, skipped)).argmax(-1)
    came = functional.pad(token_ids, (0, num_draft_tokens), value=-1).unfold(0, num_draft_tokens, 1)
    right = (said == came[start + 1 : len(token_ids)]).cumprod(-1).sum(-1).tolist()
    steps, place = [], 0
    while place < len(right):
        steps.append(right[place])
        place += steps[-1] + 1
    return steps


def measure_times(target: Decoder, num_draft_tokens: int, cache: Cache) -> Times:
    """Time the parts of a step behind what a cache holds but its last rows; medians of a few passes."""
    none, every = frozenset[int](), frozenset(range(target.num_layers))
    start = cache.length - num_draft_tokens - 1 if cache.length > num_draft_tokens else 0
    ids = torch.zeros(num_draft_tokens + 1, dtype=torch.int64, device=target.device)

    def seconds(skipped: Sublayers, num_rows: int = 1) -> float:
        took = []
        for _ in range(REPEATS):
            began = time.perf_counter()
            states = read_aside(target, ids[:num_rows], cache, start, skipped)
            target.logits(states).argmax(-1).tolist()
            took.append(time.perf_counter() - began)
        return sorted(took)[REPEATS // 2]

    whole = Sublayers(none, none)
    seconds(whole)  # the first passes are slower
    rest = seconds(Sublayers(every, every))
    attention, mlp = (max(seconds(part) - rest, 0.0) for part in (Sublayers(none, every), Sublayers(every, none)))
    target_s, plain_s = seconds(whole, num_draft_tokens + 1), seconds(whole)
    return Times(attention / target.num_layers, mlp / target.num_layers, rest, target_s, plain_s)
