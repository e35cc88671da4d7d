"""Draft families without weights: a draft is a config.json, and what it drafts from is the text itself.

Whoever asks one draft for several requests shares what it remembers of them, so a process that serves clients who must
not see each other's text needs a draft for each (`models.core.drafting.lookup.NgramIndex` keeps them apart in the
serving engine).
"""

from abc import abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from models.core.drafting import draft_format
from models.core.drafting.draft_format import check_config, read_params
from models.core.drafting.proposal import Proposal
from models.drafts import Draft, Drafter, Draw, GoOn, KeepRows, Rows, Unrolled
from models.params import BaseParams
from models.targets import TargetCard, describe


class Weightless(Draft):
    """A draft without parameters; `params` are of its family, `config` as in config.json."""

    any_layout = True

    def __init__(self, params: Any, config: dict[str, Any]) -> None:
        super().__init__()
        self.params, self.config = params, config
        self.register_buffer("_vocabulary", torch.arange(config["vocab_size"]), persistent=False)

    @property
    def vocabulary(self) -> Tensor:
        return self.get_buffer("_vocabulary")


class TextDraft(Weightless):
    """One whose drafts follow from the request's text."""

    asks = False

    @abstractmethod
    def follow(self, token_ids: list[int], num_tokens: int) -> list[int]:
        """Return what it drafts after `token_ids`: at most `num_tokens` tokens, of a tree the first branch."""

    def unroll(self, rows: Rows, num_steps: int, keep: KeepRows | None = None) -> list[Unrolled]:
        """See `models.drafts.Draft`; a row that nothing follows does not run, and logits are 0 or −∞."""
        tokens = rows.token_ids.tolist()
        found = [
            self.follow(tokens[sequence][: index + 2], num_steps)
            for sequence, index in zip(rows.sequence.tolist(), rows.index.tolist(), strict=True)
        ]
        device = rows.index.device
        running, drafted = torch.arange(len(found), device=device), []
        for step in range(num_steps):
            goes_on = [len(found[row]) > step for row in running.tolist()]
            running = running[torch.tensor(goes_on, dtype=torch.bool, device=device)]
            logits = torch.full((len(running), self.config["vocab_size"]), float("-inf"), device=device)
            for place, row in enumerate(running.tolist()):
                logits[place, found[row][step]] = 0.0
            drafted.append(Unrolled(running, logits))
            if keep is not None and step + 1 < num_steps:
                running = running[keep(step, running, logits)]
        return drafted

    def drafter(self, max_len: int) -> Drafter:
        return TextDrafter(self)


class TextDrafter:
    """See `models.drafts.Drafter`; `known` are all tokens that are certain, `device` is where they came from."""

    def __init__(self, draft: TextDraft) -> None:
        self.draft = draft
        self.known: list[int] = []
        self.device = torch.device("cpu")

    def extend(self, token_ids: Tensor, hidden: Tensor) -> None:
        self.known += token_ids.tolist()[1 if self.known else 0 :]
        self.device = token_ids.device

    def propose(self, num_tokens: int, draw: Draw, go_on: GoOn | None = None) -> Proposal:
        return Proposal.chain(self.draft.follow(self.known, num_tokens), device=self.device)


class TargetDraft(Weightless):
    """One whose drafts follow from what the target said in earlier passes, which no log tells."""

    replayable = False

    def unroll(self, rows: Rows, num_steps: int, keep: KeepRows | None = None) -> list[Unrolled]:
        """Raise a ValueError."""
        raise ValueError(
            f"{type(self).__name__} drafts from what the target says after rejected tokens too, so it can't be scored "
            "on answers that are there already; measure it in the reference engine"
        )


Kind = TypeVar("Kind", bound=Weightless)


class Format(draft_format.Format[Kind]):
    """The directory of a family without weights, of which there is config.json alone."""

    def __init__(
        self,
        family: str,
        architectures: tuple[str, ...],
        params: type[BaseParams],
        draft: Callable[[Any, dict[str, Any]], Kind],
    ) -> None:
        super().__init__(family, architectures, lambda config: draft(params(**config[family]), config), ())
        self._params = params

    def create(self, params: BaseParams, target_dir: Path, token_counts: np.ndarray) -> Kind:
        """Make a draft for a target; `token_counts` are not read."""
        own = {self._family: params.model_dump(mode="json"), "vocab_size": describe(target_dir).vocab_size}
        return self.new(own, target_dir)

    def check(self, directory: Path, like: Path | None, target: TargetCard) -> None:
        """Raise ValueError if the draft was made for another target, or differs from the served one `like`."""
        config = self.read(directory)
        served = None if like is None else self.read(like)
        check_config(config, directory, served, target)
        read_params(config, self._family, self._params, directory)
