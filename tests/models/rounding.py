"""A test of the mean of something random, with a stated error rate."""

import torch
from scipy.stats import norm
from torch import Tensor

P_VALUE = 1e-6
NUM_DRAWS = 10_000


def normal(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return normal numbers.

    A generator of the same seed draws uniform numbers that hang together with these: who rounds needs another.
    """
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def copies(values: Tensor) -> Tensor:
    """Return NUM_DRAWS copies along a new first dimension, to be drawn for in one call."""
    return values.repeat(NUM_DRAWS, *[1] * values.ndim)


def mean_p_value(drawn: Tensor, wanted: Tensor) -> float:
    """Return the p-value of "the mean over the first dimension is `wanted`", z-tests of all elements with Bonferroni.

    An element that is the same in each draw must be `wanted` to float32's rounding.
    """
    drawn, wanted = drawn.double().flatten(1), wanted.double().flatten()
    error, spread = drawn.mean(dim=0) - wanted, drawn.std(dim=0)
    certain = spread < 1e-7 * drawn.abs().amax(dim=0).clamp(min=1e-30)
    if (error.abs() > 1e-6 * wanted.abs())[certain].any():
        return 0.0
    if certain.all():
        return 1.0
    scores = (error / (spread / len(drawn) ** 0.5))[~certain].abs()
    return min(1.0, float(2 * norm.sf(scores).min()) * len(scores))
