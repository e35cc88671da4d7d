"""Self-speculation: the target drafts with some of its attention and MLP sublayers skipped.

Which ones is a search: in a build before anything is served (Draft & Verify, `offline.py`), or while requests are
decoded, on what the target has just said (SWIFT, `on_the_fly.py`). Until either has found something, both sublayers of
every second layer are skipped. The first and the last layer always run, as in SWIFT.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal, Self

import torch
from pydantic import Field, model_validator

from models.core.drafting.self_draft import SelfDraft, SelfFormat, TreeDrafter, require_part
from models.core.drafting.subset_search import Subset
from models.core.layers.decoder import Decoder, Sublayers
from models.drafts.self_skip.offline import find
from models.drafts.self_skip.on_the_fly import Tuning, TuningDrafter
from models.params import BaseParams, require_unsaid
from models.precision import fast_dtype

PAPER = "arXiv:2309.08168; on the fly: arXiv:2410.06916"
FAMILY = "self_skip"
ARCHITECTURES = ("SelfSkipDraft",)
TRAINED = False
SERVED = False


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

    @model_validator(mode="after")
    def _searches(self) -> Self:
        if not self.on_the_fly:
            keys = ("skip_share", "window", "bayes_every", "enough", "patience")
            require_unsaid(self, keys, self.name, "on_the_fly is false")
        return self


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
        """Return what a subset of `items` stands for."""
        chosen = [self.items[item] for item in subset]
        return Sublayers(*(frozenset(n for of, n in chosen if of == kind) for kind in Sublayers._fields))

    def as_subset(self, skipped: Sublayers) -> Subset:
        """Return the `items` of a part, without those that no search skips."""
        return frozenset(item for item, (kind, number) in enumerate(self.items) if number in getattr(skipped, kind))

    def drafter(self, max_len: int) -> TreeDrafter:
        return TuningDrafter(self, max_len) if self.params.on_the_fly else TreeDrafter(self, max_len)


_format = SelfFormat(FAMILY, ARCHITECTURES, Params, SelfSkip)
create, renew, save, load, check = _format.create, _format.renew, _format.save, _format.load, _format.check
vllm_config, vllm_weights = _format.vllm_config, _format.vllm_weights


def search(
    draft: SelfSkip,
    answers: Sequence[tuple[Sequence[int], Sequence[int]]],
    num_draft_tokens: int,
    seed: int,
    on_progress: Callable[[int, int, str], None] | None = None,
) -> None:
    """See `models.drafts.Searcher`."""
    if not draft.params.num_trials:
        return
    device = str(draft.vocabulary.device)
    target = Decoder.load(draft.target_dir, fast_dtype(device), device)
    rng = torch.Generator().manual_seed(seed)
    draft.skip(find(draft, target, answers, num_draft_tokens, draft.params.num_trials, rng, on_progress))


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
