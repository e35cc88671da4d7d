import math

import pytest
import torch
from torch import Tensor

from models.core.layers.numbers import minifloat
from models.regimes.lognormal_gradient import (
    Fit,
    Hooks,
    Params,
    best_split,
    expected_error,
    expected_largest,
    fit,
    fit_distance,
    prune,
    threshold,
)
from tests.models.rounding import P_VALUE, copies, mean_p_value, normal

COUNT = 100_000


def lognormal(mu: float, sigma: float, seed: int = 0) -> Tensor:
    """[COUNT] with random signs."""
    return torch.exp(mu + sigma * normal(COUNT, seed=seed)) * normal(COUNT, seed=seed + 1).sign()


def compress(gradient: Tensor, seed: int = 99, **settings: object) -> tuple[Tensor, dict[str, float]]:
    """Send a gradient back through a product with the identity."""
    made = Hooks(Params(**settings), torch.Generator().manual_seed(seed))
    inputs = torch.zeros_like(gradient, requires_grad=True)
    made.multiply(inputs, torch.eye(gradient.shape[-1])).backward(gradient)
    return inputs.grad, made.figures()


@pytest.mark.parametrize(("mu", "sigma"), [(-9.0, 0.5), (2.0, 3.0)])
def test_the_fit_finds_what_was_planted(mu: float, sigma: float) -> None:
    logs = lognormal(mu, sigma).abs().log()
    found = fit(logs)
    # Five standard errors, which seeds stay within at 6e-7.
    assert abs(found.mu - mu) < 5 * sigma / COUNT**0.5 and abs(found.sigma - sigma) < 5 * sigma / (2 * COUNT) ** 0.5
    assert found.size == COUNT
    # The 1e-6 quantile of Kolmogorov's distribution at 4096 is 2.69/64.
    assert fit_distance(logs, found) < 2.69 / 64


def test_the_distance_tells_another_distribution_from_a_lognormal() -> None:
    logs = (torch.arange(1, COUNT) / COUNT).log()  # uniform magnitudes
    assert fit_distance(logs, fit(logs)) > 0.1


@pytest.mark.parametrize(("sigma", "sparsity"), [(0.5, 0.2), (2.0, 0.5), (4.0, 0.9)])
def test_the_threshold_gives_the_sparsity_that_was_asked_for(sigma: float, sparsity: float) -> None:
    gradient = lognormal(-5.0, sigma)
    kept = prune(gradient, threshold(Fit(-5.0, sigma, COUNT), sparsity), torch.Generator().manual_seed(99))
    # Five standard errors of a share: beyond at 6e-7.
    assert abs(float((kept == 0).float().mean()) - sparsity) < 5 * (sparsity * (1 - sparsity) / COUNT) ** 0.5


def test_pruning_by_hand() -> None:
    gradient = torch.tensor([0.5, -0.5, 1.0, -3.0, 0.0]).repeat(1000, 1)
    kept = prune(gradient, 1.0, torch.Generator().manual_seed(99))
    assert kept[:, 0].unique().tolist() == [0, 1] and kept[:, 1].unique().tolist() == [-1, 0]
    assert torch.equal(kept[:, 2:], gradient[:, 2:])


@pytest.mark.parametrize(
    ("split", "sigma"), [((1, 4), 0.7), ((2, 3), 3.0), ((3, 2), 1.7), ((4, 1), 0.7), ((5, 0), 3.0)]
)
def test_the_expected_error_is_that_of_planted_data(split: tuple[int, int], sigma: float) -> None:
    found = Fit(-6.0, sigma, COUNT)
    largest = found.mu + 2.5 * sigma  # some are clipped
    scale = math.exp(largest) / (2 - 2.0 ** -split[1])
    gradient = lognormal(found.mu, sigma)
    kept = minifloat(gradient / scale, *split, 0, torch.Generator().manual_seed(99)) * scale
    measured = float(((kept - gradient) / gradient).abs().mean())
    # Magnitudes are taken as evenly spread between two numbers of the format, hence up to 10%.
    assert expected_error(found, *split, largest) == pytest.approx(measured, rel=0.1)


def test_wider_distributions_get_more_exponent_bits() -> None:
    splits = [best_split(Fit(0.0, sigma, COUNT), 6, expected_largest(Fit(0.0, sigma, COUNT))) for sigma in (0.2, 1, 5)]
    assert splits == sorted(splits) and splits[0] < splits[-1]
    assert splits[-1] == 5


def test_the_expected_largest_is_that_of_planted_data() -> None:
    found = Fit(-3.0, 1.5, 1000)
    largest = (found.mu + found.sigma * normal(2000, 1000, seed=0)).amax(dim=1)
    assert expected_largest(found) == pytest.approx(float(largest.mean()), abs=5 * float(largest.std()) / 2000**0.5)


@pytest.mark.parametrize("sparsity", [0.0, 0.6])
def test_what_goes_back_has_no_bias_while_nothing_is_clipped(sparsity: float) -> None:
    gradient = normal(6, 5, seed=0).exp() * normal(6, 5, seed=1).sign()
    # The copies together have the distribution of one.
    drawn, _ = compress(copies(gradient), num_bits=4, sparsity=sparsity, scale="maximum")
    assert mean_p_value(drawn, gradient) > P_VALUE


def test_figures_say_what_was_done() -> None:
    gradient = torch.cat([lognormal(-8.0, 2.0).view(-1, 10), torch.zeros(50, 10)])
    kept, figures = compress(gradient, num_bits=32, sparsity=0.7)
    assert figures["sigma"] == pytest.approx(2.0, abs=0.02) and figures["zero_share"] == pytest.approx(0.7, abs=0.01)
    assert figures["fit_distance"] < 2.69 / 64 and "exponent_bits" not in figures
    assert not kept[-50:].any()
    _, figures = compress(gradient, num_bits=5, exponent_bits=1)
    assert figures["exponent_bits"] == 1 and figures["clipped_share"] < 1e-4


def test_nothing_is_changed_with_all_of_it_off_or_without_gradient() -> None:
    gradient = normal(4, 3, seed=0)
    assert torch.equal(compress(gradient, num_bits=32)[0], gradient)
    assert not compress(torch.zeros(4, 3), sparsity=0.5)[0].any()
    single = torch.tensor([[0.0, 0.0, -2.5]])
    assert torch.allclose(compress(single, num_bits=4)[0], single)
