"""What tests of training share: short runs, runs that are killed, and whether two ended alike."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from models.core.learning import distill
from models.core.learning.hidden import Sample


def short(**changes: object) -> distill.Params:
    """Return settings of a run of seconds."""
    return distill.Params(**{"num_epochs": 4, "batch_tokens": 256, "num_threads": 1, **changes})


def require_equal(one: torch.nn.Module, *others: torch.nn.Module) -> None:
    """Fail unless all have the same weights bit by bit."""
    for other in others:
        assert all(torch.equal(tensor, other.state_dict()[name]) for name, tensor in one.state_dict().items())


class Killed(Exception):
    """Ends a run as a signal would."""


@contextmanager
def killed_at(step: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have the run inside killed in the middle of a step."""
    advance, steps = distill._Loop.advance, iter(range(step))

    def advance_or_die(self: distill._Loop, batch: list[Sample]) -> float:
        if next(steps, None) is None:
            raise Killed
        return advance(self, batch)

    with monkeypatch.context() as machine, pytest.raises(Killed):
        machine.setattr(distill._Loop, "advance", advance_or_die)
        yield
