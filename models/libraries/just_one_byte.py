"""Just One Byte: machines finetune one model together and send each other a byte a step.

In step t machine w draws a direction z from a generator that is seeded with (t, w), and measures with two forward
passes on data of its own how the loss changes along it,

    g = (L(θ + ε z) − L(θ − ε z)) / 2 ε,

which it rounds to a byte and sends. All know each other's seeds, so each draws each z again and steps

    θ ← θ − η / W · Σ_w g_w z_w.

Who was away, or comes anew, steps through the bytes that were sent and has the others' weights. The law is that all
have equal weights after each step, bit for bit. So, other than in the paper, weights are not moved back from θ ± ε z,
which rounds otherwise where another z was tried: what is trained is kept in a second copy. Rounding to the bit is the
same on machines of one kind alone.

A byte is a sign and 7 bits of an exponent: 0, or ±2^((b − 64) / 8) for b from 1 to 127. So magnitudes from 0.004 to 234
are off by at most 4.5%; others are 0 or the largest.

A library: it is no regime of `models.regimes`, whose methods learn in steps that follow a gradient. The variance of g z
grows with the number of weights that are trained, so that it is for few of them, such as an adapter's.

Letters: W machines.
"""

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from pydantic import Field
from torch import Tensor

from models.types import Frozen

PAPER = "arXiv:2306.10015, section 3"
STEPS_AN_OCTAVE, MIDDLE, MOST = 8, 64, 127

Loss = Callable[[int], float]  # of a step's own data, at the weights as they are
Exchange = Callable[[int, int], Sequence[int]]  # step and own byte → the bytes of all, by their numbers


class Learning(Frozen):
    epsilon: float = Field(1e-3, gt=0)  # ε, how far a direction is tried
    learning_rate: float = Field(1e-3, gt=0)  # η
    seed: int = 0  # that directions are drawn from, with step and machine


class Machine:
    """One of W machines, numbered from 0, with the `step` that comes next."""

    def __init__(
        self, trained: Mapping[str, Tensor], loss: Loss, number: int, num_machines: int, learning: Learning
    ) -> None:
        """Take tensors to train, of the same values for all machines, changed in place, and the loss that reads them;
        ValueError if nothing is trained, or there is no such machine."""
        if not trained:
            raise ValueError("wanted tensors to train, got none")
        if not 0 <= number < num_machines:
            raise ValueError(f"machines are numbered from 0 to {num_machines - 1}, got {number}")
        self.number, self.step = number, 0
        self._trained = [tensor.detach() for _, tensor in sorted(trained.items())]
        self._loss, self._num_machines, self._learning = loss, num_machines, learning

    @torch.no_grad()
    def say(self) -> int:
        """Return what this step's data say of this machine's direction, 0 to 255; the weights stay as they are.
        FloatingPointError if a loss is NaN or infinite."""
        kept = [tensor.clone() for tensor in self._trained]
        losses = []
        for sign in (1, -1):
            for tensor, whole, way in zip(self._trained, kept, self._direction(self.number), strict=True):
                tensor.copy_(whole + sign * self._learning.epsilon * way)
            losses.append(self._loss(self.step))
        for tensor, whole in zip(self._trained, kept, strict=True):
            tensor.copy_(whole)
        if not all(map(math.isfinite, losses)):
            raise FloatingPointError(f"machine {self.number}, step {self.step}: losses {losses}")
        return to_byte((losses[0] - losses[1]) / (2 * self._learning.epsilon))

    @torch.no_grad()
    def hear(self, said: Sequence[int]) -> None:
        """Step as all machines do, by their bytes in order of their numbers; ValueError if there is not one byte a
        machine; no weight was changed."""
        if len(said) != self._num_machines or not all(0 <= byte <= 255 for byte in said):
            raise ValueError(
                f"step {self.step} wants a byte of each of {self._num_machines} machines, got {list(said)}"
            )
        for number, byte in enumerate(said):
            size = self._learning.learning_rate / self._num_machines * from_byte(byte)
            for tensor, way in zip(self._trained, self._direction(number), strict=True):
                tensor.sub_(size * way)
        self.step += 1

    def learn(self, num_steps: int, exchange: Exchange) -> None:
        """Go so many steps with the others, whose bytes `exchange` waits for."""
        for _ in range(num_steps):
            self.hear(exchange(self.step, self.say()))

    def _direction(self, number: int) -> list[Tensor]:
        rng = torch.Generator().manual_seed((self._learning.seed * 1_000_003 + self.step) * 65_537 + number)
        return [torch.randn(tensor.shape, generator=rng).to(tensor) for tensor in self._trained]


def to_byte(value: float) -> int:
    """Return the nearest byte; see the module."""
    exponent = round(STEPS_AN_OCTAVE * math.log2(abs(value))) + MIDDLE if value else 0
    if exponent < 1:
        return 0
    return min(exponent, MOST) + (MOST + 1) * (value < 0)


def from_byte(byte: int) -> float:
    """Return what a byte says; see the module."""
    exponent = byte & MOST
    if exponent == 0:
        return 0.0
    return math.copysign(2.0 ** ((exponent - MIDDLE) / STEPS_AN_OCTAVE), -1 if byte > MOST else 1)
