"""Token-Shuffle: s × s neighbouring image tokens are one token of the transformer, their channels side by side.

Embeddings of image tokens are far wider than what they tell: codes of few numbers are mapped to a language model's
width. So each is narrowed to H / s², the s² of a window are put side by side, and the transformer reads a grid of s²
times fewer tokens of width H; what it puts out is taken apart the same way and widened again. MLPs on a residual path,
before and behind, may mix what is in a window.

So tokens of one window are independent given those before: what they have in common and nothing before tells is lost.
For tokens of a window that all follow one coin, plain decoding can reach log 2 nats a window, this no less than
s² log 2.

A library: no target here decodes images.

Letters: B images, R rows, C columns, H width, s side of a window.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

PAPER = "arXiv:2504.17789, section 3"


def merge(states: Tensor, side: int) -> Tensor:
    """Put the tokens of each window side by side along the channels, [B, R, C, H] → [B, R/s, C/s, s²·H], by rows;
    ValueError if windows don't cover the image, or there is none."""
    if states.ndim != 4 or side < 1 or states.shape[1] % side or states.shape[2] % side:
        raise ValueError(f"states [B, R, C, H] must be cut into windows of {side} × {side}; got {list(states.shape)}")
    batch, rows, columns, width = states.shape
    windows = states.view(batch, rows // side, side, columns // side, side, width)
    return windows.transpose(2, 3).reshape(batch, rows // side, columns // side, side * side * width)


def split(merged: Tensor, side: int) -> Tensor:
    """Take windows apart again: `split(merge(x, s), s)` is x, bit for bit; ValueError if the channels are not those of
    s² tokens."""
    if merged.ndim != 4 or side < 1 or merged.shape[-1] % side**2:
        raise ValueError(f"merged [B, R/s, C/s, s²·H] must hold {side} × {side} tokens; got {list(merged.shape)}")
    batch, rows, columns, channels = merged.shape
    windows = merged.view(batch, rows, columns, side, side, channels // side**2)
    return windows.transpose(2, 3).reshape(batch, rows * side, columns * side, channels // side**2)


class Shuffle(nn.Module):
    """[B, R, C, H] → [B, R/s, C/s, H]: narrowed, merged, mixed."""

    def __init__(self, width: int, side: int, num_mixers: int = 1) -> None:
        """Raise ValueError where s² doesn't divide the width."""
        super().__init__()
        self.side = side
        self.narrow = nn.Linear(width, _narrowed(width, side))
        self.mix = nn.Sequential(*(_Mixer(width) for _ in range(num_mixers)))

    def forward(self, states: Tensor) -> Tensor:
        mixed: Tensor = self.mix(merge(self.narrow(states), self.side))
        return mixed


class Unshuffle(nn.Module):
    """[B, R/s, C/s, H] → [B, R, C, H]: mixed, split, widened."""

    def __init__(self, width: int, side: int, num_mixers: int = 1) -> None:
        """Raise ValueError where s² doesn't divide the width."""
        super().__init__()
        self.side = side
        self.mix = nn.Sequential(*(_Mixer(width) for _ in range(num_mixers)))
        self.widen = nn.Linear(_narrowed(width, side), width)

    def forward(self, merged: Tensor) -> Tensor:
        states: Tensor = self.widen(split(self.mix(merged), self.side))
        return states


class _Mixer(nn.Module):
    """An MLP on a residual path, which adds nothing at first."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, width)
        nn.init.zeros_(self.down.weight)
        nn.init.zeros_(self.down.bias)

    def forward(self, states: Tensor) -> Tensor:
        added: Tensor = self.down(functional.gelu(self.up(self.norm(states))))
        return states + added


def _narrowed(width: int, side: int) -> int:
    if side < 1 or width % side**2:
        raise ValueError(f"side {side} makes windows of {side**2} tokens, which don't divide a width of {width}")
    return width // side**2


def shifted(merged: Tensor) -> Tensor:
    """Return [B, R/s · C/s, H], what is read where each window is said: the one before it; zeros for the first."""
    flat = merged.flatten(1, 2)
    return torch.cat([torch.zeros_like(flat[:, :1]), flat[:, :-1]], dim=1)
