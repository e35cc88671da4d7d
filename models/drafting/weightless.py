"""Draft families without weights: a draft is a config.json, and what it drafts from is the text itself.

Whoever asks one draft for several requests shares what it remembers of them, so a process that serves clients who must
not see each other's text needs a draft for each (`models.drafting.lookup.NgramIndex` keeps them apart in the serving
engine).
"""

from abc import abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from models.drafting.draft_files import check_config, made_for, read_config, write_config
from models.drafts import Draft, KeepRows, Rows, Unrolled
from models.params import BaseParams, validate
from models.targets import TargetCard, describe


class Weightless(Draft):
    """A draft without parameters.

    Attributes:
        params: of its family.
        config: as in config.json.
    """

    def __init__(self, params: Any, config: dict[str, Any]) -> None:
        super().__init__()
        self.params, self.config = params, config
        self.register_buffer("_vocabulary", torch.arange(config["vocab_size"]), persistent=False)

    @property
    def taps(self) -> tuple[int, ...]:
        """Nothing of the target's states is read."""
        return ()

    @property
    def vocabulary(self) -> Tensor:
        """All of the target's."""
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


class TargetDraft(Weightless):
    """One whose drafts follow from what the target said in earlier passes, which no log tells."""

    replayable = False

    def unroll(self, rows: Rows, num_steps: int, keep: KeepRows | None = None) -> list[Unrolled]:
        """Raise a ValueError."""
        raise ValueError(
            f"{type(self).__name__} drafts from what the target says after rejected tokens too, so it can't be scored "
            "on answers that are there already; measure it in the reference engine"
        )


class Format:
    """The directory of a family without weights: those functions of `models.drafts.Family` that all of them share."""

    def __init__(
        self,
        family: str,
        architectures: tuple[str, ...],
        params: type[BaseParams],
        draft: Callable[[Any, dict[str, Any]], Weightless],
    ) -> None:
        self._family, self._architectures, self._params, self._draft = family, architectures, params, draft

    def create(self, params: BaseParams, target_dir: Path, token_counts: np.ndarray) -> Weightless:
        """Make a draft for a target; `token_counts` are not read."""
        return self._draft(params, self._new_config(params, describe(target_dir)))

    def renew(self, draft: Weightless, target_dir: Path, token_counts: np.ndarray) -> Weightless:
        """Return the draft as it is: it follows every text by itself."""
        return draft

    def save(self, draft: Weightless, directory: Path) -> None:
        """Write config.json into `directory`."""
        write_config(draft.config, self._family, directory)

    def load(self, directory: Path, target_dir: Path) -> Weightless:
        """Read a draft back; ValueError as `check`."""
        self.check(directory, like=None, target=describe(target_dir))
        return self._read(directory)

    def check(self, directory: Path, like: Path | None, target: TargetCard) -> None:
        """Raise ValueError if the draft was made for another target, or differs from the served one `like`."""
        config = read_config(directory, self._family, self._architectures)
        served = None if like is None else read_config(like, self._family, self._architectures)
        check_config(config, directory, served, target)
        self._read_params(config, directory)

    def vllm_config(self, directory: Path) -> dict[str, Any]:
        """Raise a ValueError: vLLM has no such proposer."""
        raise ValueError(f'vLLM can\'t draft with family {self._family}; engine "torch" can')

    def vllm_weights(self, directory: Path) -> None:
        """Return None: there is nothing to load."""

    def _new_config(self, params: BaseParams, card: TargetCard) -> dict[str, Any]:
        return {
            "architectures": list(self._architectures),
            self._family: params.model_dump(mode="json"),
            "vocab_size": card.vocab_size,
            "redraft": made_for(card),
        }

    def _read(self, directory: Path) -> Weightless:
        config = read_config(directory, self._family, self._architectures)
        return self._draft(self._read_params(config, directory), config)

    def _read_params(self, config: dict[str, Any], directory: Path) -> BaseParams:
        table = config.get(self._family)
        if not isinstance(table, dict):
            raise ValueError(f'draft {directory.name}: config.json has "{self._family}" {table!r}; wanted its settings')
        return validate(self._params, table, f"draft {directory.name}")
