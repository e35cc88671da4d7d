"""Answers that a draft is distilled on: who writes their tokens, and how much a token counts.

In all of them the label is what the target says after the text before, so that a text may be anybody's. A file has
`PAPER`, `Params`, and

- `WRITES`: whether tokens may be the draft's own. Then its `Params` are `RolloutParams`, `ROUNDS` is the class that
  writes them (`RolloutSource`), and `by_draft(lengths, params, rng) -> list[list[bool] | None]` says of answers of
  these lengths who writes which token; None keeps the target's answer as it is;
- `LOGGED`: whether it reads what drafts did in served requests;
- `weigh(samples, params) -> list[list[float]]`: in those that are `LOGGED`, and in others where tokens do not count
  the same: how much each token of each answer counts;
- `require_domains(params, domains)`: where it reads of which domains the answers are; ValueError if these won't do.

The first token of an answer is the target's in any case: no draft is asked for it.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Literal, Protocol

import torch
from pydantic import Field
from torch import Tensor

from models import catalog
from models.core.learning.hidden import HiddenStates, Sample
from models.params import BaseParams


class RolloutParams(BaseParams):
    """How answers are written anew while the draft learns.

    Attributes:
        rounds: how often the draft writes, evenly over the steps; between two rounds what it wrote grows old.
        temperature: at which either model's tokens are drawn; 0 takes the likeliest.
    """

    rounds: int = Field(4, ge=1)
    temperature: float = Field(1.0, ge=0)


OnProgress = Callable[[Literal["answers", "hidden states"], int, int, float], None]


class RolloutSource(Protocol):
    """The rounds in which a run writes what it learns; see `models.core.learning.rollouts`."""

    samples: list[Sample]  # the target's answers, in whose place others are written
    tokens_per_s: float  # at which the target read the last ones

    def at(self, step: int, total: int) -> int:
        """Return which round a step is of."""

    def begin(self, number: int, key: str, report: OnProgress) -> HiddenStates:
        """Return what is learnt in a round, with the target's states."""

    def end(self) -> None:
        """Remove what was written."""


def token_counts(samples: Sequence[Sample], answers: BaseParams) -> dict[str, Tensor]:
    """Return id to [T] how much each token of prompt and answer counts; empty where all count the same."""
    source = catalog.load("answers", answers.name)
    if not hasattr(source, "weigh"):
        return {}
    weights = source.weigh(samples, answers)
    return {
        sample.id: torch.tensor([0.0] * len(sample.prompt_ids) + of_answer)
        for sample, of_answer in zip(samples, weights, strict=True)
    }


def require_labels(answers: BaseParams, loss: BaseParams) -> None:
    """Raise ValueError if a loss takes the token that came for the target's word, where it may be the draft's own."""
    if catalog.load("answers", answers.name).WRITES and "token" in catalog.load("losses", loss.name).NEEDS:
        raise ValueError(
            f'answers "{answers.name}" hold tokens of the draft\'s own, and loss "{loss.name}" would learn them as the '
            "target's; choose a loss that reads the target's distribution, such as loss = { name = \"forward_kl\" }"
        )


def require_source(
    answers: BaseParams, loss: BaseParams | None, of_log: bool, domains: Collection[str], workers: bool
) -> None:
    """Raise ValueError if a draft can't learn from such answers by its loss, which is None where nothing is learnt.
    `of_log` says whether they come from the query log, `workers` whether several processes train, and `domains` are
    those that a first draft is trained on; later drafts keep answers of theirs."""
    source = catalog.load("answers", answers.name)
    if source.WRITES and workers:
        raise ValueError(f'answers "{answers.name}" are written by the draft as it learns: leave [train] out')
    if (source.WRITES or hasattr(source, "weigh")) and loss is None:
        raise ValueError(f'answers "{answers.name}" are for drafts that are trained, and this one has no weights')
    if source.LOGGED and not of_log:
        raise ValueError(
            f'answers "{answers.name}" are those of the query log, which a first draft does not have; say so for '
            f'refreshes alone: [refresh] distill = {{ answers = {{ name = "{answers.name}" }} }}'
        )
    if hasattr(source, "require_domains"):
        source.require_domains(answers, domains)
    if loss is not None:
        require_labels(answers, loss)
