"""Self-speculation: the target drafts with some of its attention and MLP sublayers skipped.

Which ones is a search: in a build before anything is served (Draft & Verify), or while requests are decoded, on what
the target has just said (SWIFT). Until either has found something, both sublayers of every second layer are skipped.
The first and the last layer always run, as in SWIFT.

Draft & Verify decodes texts with each set and times it. Here what decoding would accept is counted on answers that are
there already, with the keys and values that decoding has, and a step's time is put together from parts that are
measured once: K passes of the draft, by the sublayers that run, and the target's pass over K + 1 rows. So one set is
not favoured over another by what else the machine did meanwhile.

A trial of SWIFT's is one pass of the part over the first tokens of the request's answer, told all that came before; the
score is the share of them that it finds likeliest. Sets all skip equally many sublayers. Most are random; now and then
one is what a search over all that was tried, by any request, suggests. The paper's code holds a set to the best score
of any earlier request; here the set in use is scored on each request's own tokens first.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional

from models.core.drafting.proposal import Proposal
from models.core.drafting.self_draft import SelfDraft, SelfFormat, TreeDrafter, read_ahead, read_aside, require_part
from models.core.drafting.subset_search import Subset, SubsetSearch
from models.core.layers.decoder import Cache, Decoder, Sublayers
from models.core.layers.kernels import fast_dtype
from models.drafts import Draw, GoOn
from models.params import BaseParams, unread

PAPER = "arXiv:2309.08168; on the fly: arXiv:2410.06916"
ARCHITECTURES = ("SelfSkipDraft",)
SERVED = False
NUM_ANSWERS = 8
REPEATS = 9


class Params(BaseParams):
    """What is skipped, or how that is found.

    Attributes:
        skip_attention: layers whose attention is skipped at first.
        skip_mlp: layers whose MLP is skipped at first. Both, or by default neither, are given.
        num_trials: sets that a build tries; 0 leaves the first one.
        on_the_fly: sets are tried while requests are decoded too, one a step; the keys below are for that.
        skip_share: of the sublayers that may be skipped, how many each of these sets skips.
        window: of the answer's tokens, how many first ones a set is tried on.
        bayes_every: of so many sets one is the search's guess, the others are random.
        enough: share of the window's tokens said as the target said them, from which on nothing is tried.
        patience: sets in a row that were no better, after which nothing is tried any more.
    """

    name: Literal["self_skip"] = "self_skip"
    skip_attention: tuple[int, ...] | None = None
    skip_mlp: tuple[int, ...] | None = None
    num_trials: int = Field(60, ge=0)
    on_the_fly: bool = False
    skip_share: float = Field(0.45, gt=0, le=1)
    window: int = Field(32, ge=1)
    bayes_every: int = Field(25, ge=1)
    enough: float = Field(0.95, gt=0, le=1)
    patience: int = Field(300, ge=1)
    _trials = unread(
        *("skip_share", "window", "bayes_every", "enough", "patience"),
        when=lambda params: not params.on_the_fly,
        why="on_the_fly is false",
    )


class Tuning:
    def __init__(self, num_items: int, size: int, params: Params) -> None:
        self._search = SubsetSearch(num_items, torch.Generator().manual_seed(0), size)
        self._every, self._patience = params.bayes_every, params.patience
        self._in_vain = 0

    @property
    def over(self) -> bool:
        return self._in_vain >= self._patience

    def next(self) -> Subset:
        guessed = (len(self._search.tried) + 1) % self._every == 0
        return self._search.promising() if guessed else self._search.random()

    def note(self, subset: Subset, score: float, better: bool) -> None:
        """Take in how a set did, and whether it is in use from now on."""
        self._search.note(subset, score)
        self._in_vain = 0 if better else self._in_vain + 1


class SelfSkip(SelfDraft):
    """The target without some sublayers.

    Attributes:
        items: the sublayers that a search may skip, as kind and number of the layer.
        tuning: what all requests try on the fly.
    """

    params: Params

    def __init__(self, params: Params, config: dict[str, Any]) -> None:
        super().__init__(params, config)
        num_layers = config["num_hidden_layers"]
        if num_layers < 2:
            raise ValueError(f"self_skip takes targets of at least 2 layers; got {num_layers}")
        inner = range(1, max(num_layers - 1, 2))
        self.items = [(kind, number) for number in inner for kind in Sublayers._fields]
        self.skip(_read_skipped(config["redraft"]) or _first(params, inner))
        share = max(1, round(params.skip_share * len(self.items)))
        self.tuning = Tuning(len(self.items), share, params)

    def skip(self, skipped: Sublayers) -> None:
        """Leave these sublayers out from now on; ValueError if the target has not these, or nothing would run."""
        require_part(skipped, self.config["num_hidden_layers"])
        self.skipped = skipped
        found = {kind: sorted(numbers) for kind, numbers in skipped._asdict().items()}
        self.config["redraft"] = {**self.config["redraft"], "skipped": found}

    def as_sublayers(self, subset: Subset) -> Sublayers:
        chosen = [self.items[item] for item in subset]
        return Sublayers(*(frozenset(n for of, n in chosen if of == kind) for kind in Sublayers._fields))

    def as_subset(self, skipped: Sublayers) -> Subset:
        """Return the `items` of a part, without those that no search skips."""
        return frozenset(item for item, (kind, number) in enumerate(self.items) if number in getattr(skipped, kind))

    def drafter(self, max_len: int) -> TreeDrafter:
        return (TuningDrafter if self.params.on_the_fly else TreeDrafter)(self, max_len)


class TuningDrafter(TreeDrafter):
    """A drafter that tries a set before it proposes."""

    draft: SelfSkip

    def __init__(self, draft: SelfSkip, max_len: int) -> None:
        super().__init__(draft, max_len)
        self._scored: tuple[Sublayers, float] | None = None  # the set in use, on this request
        self._tried = False  # in this step

    def extend(self, token_ids: Tensor, hidden: Tensor) -> None:
        super().extend(token_ids, hidden)
        self._tried = False

    def propose(self, num_tokens: int, draw: Draw, go_on: GoOn | None = None) -> Proposal:
        self._try()
        return super().propose(num_tokens, draw, go_on)

    def expand(self, token_ids: Sequence[int], parents: Sequence[int], nodes: Sequence[int]) -> Tensor:
        self._try()
        return super().expand(token_ids, parents, nodes)

    def _try(self) -> None:
        draft, params = self.draft, self.draft.params
        enough_said = len(self.known) - self.num_asked > params.window
        if self._tried or draft.tuning.over or not enough_said:
            return
        self._tried = True
        if self._scored is None or self._scored[0] != draft.skipped:
            self._scored = draft.skipped, self._score(draft.skipped)
        if self._scored[1] >= params.enough:
            return
        subset = draft.tuning.next()
        skipped = draft.as_sublayers(subset)
        score = self._score(skipped)
        better = score > self._scored[1]
        draft.tuning.note(subset, score, better)
        if better:
            draft.skip(skipped)
            self._scored = skipped, score

    def _score(self, skipped: Sublayers) -> float:
        """Return the share of the window's tokens that a part finds likeliest."""
        target, cache = self.target_and_cache()
        start, window = self.num_asked, self.draft.params.window
        said = torch.tensor(self.known[start : start + window + 1], device=target.device)
        states = read_aside(target, said[:-1], cache, start, skipped)
        return float((target.logits(states).argmax(-1) == said[1:]).float().mean())


_format = SelfFormat("self_skip", ARCHITECTURES, Params, SelfSkip)
create, renew, save, load, check = _format.create, _format.renew, _format.save, _format.load, _format.check
vllm_config, vllm_weights = _format.vllm_config, _format.vllm_weights


def search(
    draft: SelfSkip,
    answers: Sequence[tuple[Sequence[int], Sequence[int]]],
    num_draft_tokens: int,
    seed: int,
    on_progress: Callable[[int, int, str], None] | None = None,
) -> None:
    """Fit a draft, beginning with what it is, to answers: token ids of each prompt and of what the target answered.

    `num_draft_tokens` is K as served; `on_progress` is called with what is done, of how much, and a word about it.
    ValueError if the answers are too few or too short.
    """
    if not draft.params.num_trials:
        return
    device = str(draft.vocabulary.device)
    target = Decoder.load(draft.target_dir, fast_dtype(device), device)
    rng = torch.Generator().manual_seed(seed)
    draft.skip(find(draft, target, answers, num_draft_tokens, draft.params.num_trials, rng, on_progress))


class Times(NamedTuple):
    attention: float  # of a layer's attention, one row
    mlp: float  # of a layer's MLP, one row
    rest: float  # of a draft's pass without any layer: embedding, last norm and output matrix
    target: float  # of the target's pass that verifies
    plain: float  # of the target's pass where nothing is drafted

    def step(self, skipped: Sublayers, num_layers: int, num_draft_tokens: int) -> float:
        """Return the seconds of a step that drafts so many tokens."""
        attention = self.attention * (num_layers - len(skipped.attention))
        return num_draft_tokens * (attention + self.mlp * (num_layers - len(skipped.mlp)) + self.rest) + self.target


@torch.inference_mode()
def find(
    draft: SelfSkip,
    target: Decoder,
    answers: Sequence[tuple[Sequence[int], Sequence[int]]],
    num_draft_tokens: int,
    num_trials: int,
    rng: torch.Generator,
    on_progress: Callable[[int, int, str], None] | None = None,
) -> Sublayers:
    """Return the best of so many sets: the draft's own, a third of them random, the rest what the search suggests. Of
    `answers` the first ones of at least two tokens are used; ValueError if there are none."""
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
    target: Decoder, token_ids: Tensor, start: int, cache: Cache, skipped: Sublayers, num_draft_tokens: int
) -> list[int]:
    """Return how many tokens each step of decoding an answer greedily would accept. `token_ids` [T] hold the answer
    from `start` on; `cache` is of all of them, with room for K times the answer."""
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


def _first(params: Params, inner: range) -> Sublayers:
    if params.skip_attention is None and params.skip_mlp is None:
        return Sublayers(frozenset(inner[::2]), frozenset(inner[::2]))
    return Sublayers(frozenset(params.skip_attention or ()), frozenset(params.skip_mlp or ()))


def _read_skipped(made: dict[str, Any]) -> Sublayers | None:
    if "skipped" not in made:
        return None
    found = made["skipped"]
    if not (
        isinstance(found, dict)
        and found.keys() == {*Sublayers._fields}
        and all(isinstance(of, list) and all(type(number) is int for number in of) for of in found.values())
    ):
        raise ValueError(f"redraft.skipped must hold lists of layers, attention and mlp; got {found!r}")
    return Sublayers(frozenset(found["attention"]), frozenset(found["mlp"]))
