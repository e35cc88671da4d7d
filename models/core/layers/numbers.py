"""Number formats of few bits, simulated in floating point: what comes back is exactly what the format can hold.

Each function rounds to the nearest value of its format, ties to even, or, given a generator, stochastically: up with
the probability that makes the mean exact. No format has infinities or NaN, and none stores a scale in fewer bits than
a float32 or, where a scale is a power of two, the exponent of one.
"""

import torch
from torch import Tensor, nn

LEAST_EXPONENT = -100  # of a simulated format, so that no step is below float32's normal numbers


def rounded(values: Tensor, rng: torch.Generator | None = None) -> Tensor:
    """Round to integers: to the nearest, ties to even; with `rng` ⌊x⌋ + 1 comes with probability x − ⌊x⌋."""
    if rng is None:
        return values.round()
    below = values.floor()
    draws = torch.rand(values.shape, generator=rng, device=rng.device, dtype=torch.float32).to(values.device)
    return below + (draws < values - below).to(values.dtype)


def fixed_point(values: Tensor, num_bits: int, scale: Tensor | float, rng: torch.Generator | None = None) -> Tensor:
    """Round to the 2^num_bits − 1 multiples of scale / (2^(num_bits−1) − 1) from −scale to scale; zero is one of them.

    `num_bits` of at least 2 include the sign; `scale` broadcasts, and what is beyond it is clipped.
    """
    _require("num_bits", num_bits, 2)
    top: int = 2 ** (num_bits - 1) - 1
    return rounded((values / scale).clamp(-1, 1) * top, rng) * scale / top


def unit_interval(values: Tensor, num_bits: int, rng: torch.Generator | None = None) -> Tensor:
    """Round to the 2^num_bits values i / (2^num_bits − 1) of [0, 1]; others are clipped (DoReFa's quantize_k)."""
    _require("num_bits", num_bits, 1)
    top: int = 2**num_bits - 1
    return rounded(values.clamp(0, 1) * top, rng) / top


def block_floating_point(
    values: Tensor, mantissa_bits: int, tile: int, rng: torch.Generator | None = None
) -> tuple[Tensor, Tensor]:
    """Round matrices to block floating point: each tile, a square of side `tile` but at the edges, shares one exponent.

    An element is ± an integer mantissa below 2^mantissa_bits times 2^(exponent − mantissa_bits). A tile's exponent is
    the least with which its largest magnitude fits, so nothing is clipped and stochastic rounding has no bias. [..., R,
    C] → [..., R, C] the rounded values, and [..., ⌈R/tile⌉, ⌈C/tile⌉] int32 the exponents (0 for a tile of zeroes).
    """
    _require("mantissa_bits", mantissa_bits, 1)
    _require("tile", tile, 1)
    num_rows, num_columns = values.shape[-2:]
    padded = nn.functional.pad(values, (0, -num_columns % tile, 0, -num_rows % tile))
    tiles = padded.unflatten(-1, (-1, tile)).unflatten(-3, (-1, tile))
    largest = tiles.abs().amax(dim=(-3, -1))
    fraction, exponents = torch.frexp(largest)  # fraction in [0.5, 1), or 0
    exponents = (exponents + (fraction > 1 - 2.0**-mantissa_bits)).clamp(min=LEAST_EXPONENT)
    step = torch.ldexp(torch.ones_like(largest), exponents - mantissa_bits)[..., :, None, :, None]
    kept = (rounded(tiles / step, rng) * step).view(padded.shape)[..., :num_rows, :num_columns]
    return kept.contiguous(), exponents


def minifloat(
    values: Tensor, exponent_bits: int, mantissa_bits: int, top: int, rng: torch.Generator | None = None
) -> Tensor:
    """Round to a float of 1 + exponent_bits + mantissa_bits bits with subnormals.

    The exponent field 0 holds zero and the subnormals, the others 1 to 2^exponent_bits − 1 the powers up to 2^top; with
    one exponent bit all steps are equal. What is beyond the largest number, (2 − 2^−mantissa_bits)·2^top, is clipped.
    """
    _require("exponent_bits", exponent_bits, 1)
    _require("mantissa_bits", mantissa_bits, 0)
    largest = (2 - 2.0**-mantissa_bits) * 2.0**top
    clipped = values.clamp(-largest, largest)
    exponents = torch.frexp(clipped)[1] - 1  # |x| is in [2^e, 2^(e+1))
    exponents = exponents.clamp(min=max(lowest_exponent(exponent_bits, top), LEAST_EXPONENT))
    # A value that rounds up to the next power of two is exact there too.
    step = torch.ldexp(torch.ones_like(clipped), exponents - mantissa_bits)
    return rounded(clipped / step, rng) * step


def lowest_exponent(exponent_bits: int, top: int) -> int:
    """Return the exponent of the smallest normal number of a `minifloat`."""
    return int(top - 2**exponent_bits + 2)


def _require(name: str, value: int, least: int) -> None:
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")
