"""Data selection: which documents of a pool are worth training on.

Letters: M documents of the pool, H width of the target's states, b documents wanted, K rounds.

Selection via proxy (Coleman 2019): in K rounds of b/K a small model is trained on what was chosen so far and says what
is wanted next. A method's module has

- `pick(proxy, chosen, num_wanted, params, rng) -> list[int]`: that many places in the pool that are not in `chosen`,
  what is wanted most first;
- `NEEDS_START`: whether something must have been chosen before it can say anything. The first round of such a method is
  random;
- `TRAINS`: whether it asks a proxy that is trained on what was chosen so far;
- `DRAFTS`: whether it asks what the target accepts of a draft, so that the proxy has to be another model than that.
"""

from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from models import catalog
from models.core.evaluation.scoring import score
from models.core.learning.hidden import Sample
from models.core.learning.training import pad
from models.drafts import Draft
from models.params import BaseParams

Document = Sequence[int]


class Sources(NamedTuple):
    """Where a proxy has its figures from, by places of chosen documents; a method that asks for one that isn't given is
    refused."""

    train: Callable[[list[int]], PreTrainedModel] | None = None  # makes a small model that is trained on these
    target: Callable[[], PreTrainedModel] | None = None  # called once
    acceptance: Callable[[list[int]], Tensor] | None = None  # see `acceptance`; of a draft that may learn these first


class Certainty(NamedTuple):
    """How sure a model is of the next token, a mean over each document's tokens."""

    confidence: Tensor  # [M] largest probability
    entropy: Tensor  # [M] in nats
    margin: Tensor  # [M] largest less second largest probability


class Proxy:
    """What a method may ask; each figure is computed when it is first asked for, those of a round once a round."""

    def __init__(self, pool: Sequence[Document], sources: Sources) -> None:
        self.pool, self._sources = pool, sources
        self._chosen: list[int] = []

    def begin(self, chosen: Sequence[int]) -> None:
        """Begin a round: figures that depend on what was chosen are computed anew."""
        self._chosen = list(chosen)
        for figure in ("certainty", "acceptance"):
            vars(self).pop(figure, None)

    @cached_property
    def certainty(self) -> Certainty:
        """Of a small model trained on what was chosen; ValueError if there is no way to train one."""
        if self._sources.train is None:
            raise ValueError("this method asks a proxy model how sure it is; give `train` to make one")
        return certainty(self._sources.train(list(self._chosen)), self.pool)

    @cached_property
    def features(self) -> Tensor:
        """[M, H] of the target; ValueError if there is no target."""
        if self._sources.target is None:
            raise ValueError("this method compares documents by the target's hidden states; give `target`")
        return features(self._sources.target(), self.pool)

    @cached_property
    def acceptance(self) -> Tensor:
        """[M] mean accepted length of the current draft; ValueError if there is none, or not one figure a document."""
        if self._sources.acceptance is None:
            raise ValueError("this method asks what of the current draft is accepted; give `acceptance`")
        found = self._sources.acceptance(list(self._chosen))
        if found.shape != (len(self.pool),):
            raise ValueError(f"acceptance must be [{len(self.pool)}], one a document; got {list(found.shape)}")
        return found


def select(
    pool: Sequence[Document],
    num_chosen: int,
    num_rounds: int,
    params: BaseParams,
    sources: Sources,
    rng: torch.Generator,
) -> list[int]:
    """Choose b documents, of two tokens or more, in K rounds of equal size; else the first ones take one more.

    `rng` draws the random first round, and what the method draws. Returned are [b] places in the pool, in the order in
    which they were chosen. ValueError if more are wanted than the pool has, or fewer than rounds, one round of a method
    that needs a start, a document has fewer than two tokens, or the method asks for a source that isn't given.
    """
    method = catalog.load("select", params.name)
    if num_rounds < 1 or num_chosen < num_rounds:
        raise ValueError(f"num_chosen must be at least num_rounds, and that at least 1; got {num_chosen}, {num_rounds}")
    if num_chosen > len(pool):
        raise ValueError(f"num_chosen must be at most {len(pool)}, the documents of the pool; got {num_chosen}")
    if method.NEEDS_START and num_rounds == 1:
        raise ValueError(f"the first round of {params.name} is random, so num_rounds must be at least 2; got 1")
    if (short := next((place for place, document in enumerate(pool) if len(document) < 2), None)) is not None:
        raise ValueError(f"document {short} of the pool has {len(pool[short])} tokens; wanted at least 2")
    proxy = Proxy(pool, sources)
    chosen: list[int] = []
    for number in range(num_rounds):
        size = num_chosen // num_rounds + (number < num_chosen % num_rounds)
        if not chosen and method.NEEDS_START:
            chosen += draw(len(pool), chosen, size, rng)
        else:
            proxy.begin(chosen)
            chosen += method.pick(proxy, chosen, size, params, rng)
    return chosen


def by_score(
    score: Callable[[Proxy], Tensor],
) -> Callable[[Proxy, Sequence[int], int, BaseParams, torch.Generator], list[int]]:
    """Return the `pick` of a method that wants the documents of the highest scores."""

    def pick(
        proxy: Proxy, chosen: Sequence[int], num_wanted: int, params: BaseParams, rng: torch.Generator
    ) -> list[int]:
        return highest(score(proxy), chosen, num_wanted)

    return pick


def draw(num_documents: int, chosen: Sequence[int], num_wanted: int, rng: torch.Generator) -> list[int]:
    """Return `num_wanted` places at random that are not in `chosen`."""
    taken = set(chosen)
    order = torch.randperm(num_documents, generator=rng).tolist()
    return [place for place in order if place not in taken][:num_wanted]


def highest(scores: Tensor, chosen: Sequence[int], num_wanted: int) -> list[int]:
    """Return the places of the highest scores [M] that are not in `chosen`; of equal ones the first. ValueError if a
    score is NaN, such as of a proxy whose training failed."""
    if bool(scores.isnan().any()):
        raise ValueError(f"document {int(scores.isnan().nonzero()[0])} has no score: it is NaN")
    taken = set(chosen)
    order = scores.argsort(descending=True, stable=True).tolist()
    return [place for place in order if place not in taken][:num_wanted]


@torch.inference_mode()
def certainty(model: PreTrainedModel, documents: Sequence[Document], max_logits: int = 1 << 25) -> Certainty:
    """Measure how sure a model is of the token after each of a document's but the last. A batch's logits, which are the
    most that is held, are at most `max_logits` numbers, but for those of one document."""
    found: list[tuple[int, list[float]]] = []
    longest = max(map(len, documents), default=1)
    batch_size = max(1, max_logits // (longest * model.config.vocab_size))
    for places, token_ids in _batches(model, documents, batch_size):
        logits = model(input_ids=token_ids, use_cache=False).logits.float()
        for row, place in enumerate(places):
            log_probs = logits[row, : len(documents[place]) - 1].log_softmax(-1)
            probs = log_probs.exp()
            first, second = probs.topk(2, dim=-1).values.unbind(-1)
            entropy = -(probs * log_probs).sum(-1)
            found.append((place, [float(figure.mean()) for figure in (first, entropy, first - second)]))
    return Certainty(*torch.tensor([figures for _, figures in sorted(found)]).unbind(1))


@torch.inference_mode()
def features(model: PreTrainedModel, documents: Sequence[Document], batch_size: int = 16) -> Tensor:
    """[M, H] mean over each document's tokens of the model's last hidden states."""
    found: list[tuple[int, Tensor]] = []
    for places, token_ids in _batches(model, documents, batch_size):
        states = model.base_model(input_ids=token_ids, use_cache=False).last_hidden_state.float()
        found += [(place, states[row, : len(documents[place])].mean(0)) for row, place in enumerate(places)]
    return torch.stack([mean for _, mean in sorted(found, key=lambda one: one[0])]).cpu()


def acceptance(
    draft: Draft,
    target_dir: Path,
    documents: Sequence[Document],
    num_draft_tokens: int,
    work_dir: Path,
    device: str = "cpu",
) -> Tensor:
    """Measure what of a draft is accepted on each document, as if the target had sampled it at temperature 1.

    Returned is [M] 1 + expected accepted tokens / steps, each token but the first, the prompt, taken as a start
    of a step. `work_dir` keeps the target's states for the next draft, and belongs to these documents alone. ValueError
    if one has less than four tokens, and so no step.
    """
    if (short := next((place for place, document in enumerate(documents) if len(document) < 4), None)) is not None:
        raise ValueError(f"document {short} has {len(documents[short])} tokens; acceptance takes at least 4")
    samples = [
        Sample(f"{place:08d}", "pool", list(document[:1]), list(document[1:]), temperature=1.0)
        for place, document in enumerate(documents)
    ]
    scores = score(draft, target_dir, samples, num_draft_tokens, work_dir, device)
    return torch.tensor([1 + one.accepted / one.steps for one in scores])


def _batches(model: PreTrainedModel, documents: Sequence[Document], batch_size: int) -> list[tuple[list[int], Tensor]]:
    """Return places of documents of like length with their padded ids; no token attends to padding on its right."""
    model.eval()
    order = sorted(range(len(documents)), key=lambda place: len(documents[place]))
    chunks = [order[start : start + batch_size] for start in range(0, len(order), batch_size)]
    return [(chunk, pad([documents[place] for place in chunk]).token_ids.to(model.device)) for chunk in chunks]
