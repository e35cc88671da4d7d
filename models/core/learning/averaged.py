"""The mean of a run's last weights, in place of a falling learning rate; others go on from the weights themselves."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class Averaged:
    """The mean of weights over steps; empty where none is wanted.

    Attributes:
        tensors: name to mean, changed in place.
        number: of steps that are in it.
    """

    def __init__(self, trained: Mapping[str, nn.Parameter], wanted: bool) -> None:
        """Take name to parameter, and whether a mean is wanted."""
        self.tensors: dict[str, Tensor] = {name: torch.zeros_like(p) for name, p in trained.items()} if wanted else {}
        self.number = 0
        self._trained = trained

    def begin(self) -> None:
        """Forget the steps so far."""
        self.number = 0
        for tensor in self.tensors.values():
            tensor.zero_()

    @torch.no_grad()
    def add(self) -> None:
        """Take the weights as they are now into the mean."""
        self.number += 1
        for name, tensor in self.tensors.items():
            tensor += (self._trained[name] - tensor) / self.number

    @torch.no_grad()
    def put(self) -> None:
        """Put the mean in the place of the weights, if there is one."""
        if self.tensors and self.number:
            for name, parameter in self._trained.items():
                parameter.copy_(self.tensors[name])

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Have the mean in the place of the weights for as long as the context lasts."""
        own = {name: p.detach().clone() for name, p in self._trained.items()} if self.tensors and self.number else {}
        self.put()
        try:
            yield
        finally:
            with torch.no_grad():
                for name, tensor in own.items():
                    self._trained[name].copy_(tensor)
