import pytest
import torch
from torch import Tensor

from models.core.layers.numbers import block_floating_point, fixed_point, minifloat, rounded, unit_interval
from tests.models.rounding import P_VALUE, copies, mean_p_value


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_rounding_takes_ties_to_even_or_stochastically_one_of_the_two_neighbours_and_leaves_integers() -> None:
    assert rounded(torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5, 2.6])).tolist() == [0, 2, 2, 0, -2, 3]
    values = torch.tensor([0.25, -0.25, 7.0, -3.0, 2.999]).repeat(1000, 1)
    drawn = rounded(values, torch.Generator().manual_seed(0))
    assert ((drawn == values.floor()) | (drawn == values.ceil())).all()
    assert drawn[:, 0].unique().tolist() == [0, 1] and drawn[:, 1].unique().tolist() == [-1, 0]
    assert drawn[:, 2].unique().tolist() == [7] and drawn[:, 3].unique().tolist() == [-3]


def test_fixed_point_and_the_unit_interval_by_hand() -> None:
    # Three bits and scale 6: the multiples of 2 from -6 to 6.
    values = torch.tensor([-9.0, -6.0, -1.2, 0.9, 3.1, 5.5])
    assert fixed_point(values, 3, 6.0).tolist() == [-6, -6, -2, 0, 4, 6]
    # Two bits: 0, 1/3, 2/3, 1. One half is 1.5 steps, a tie that goes to the even 2.
    values = torch.tensor([-1.0, 0.1, 0.2, 0.5, 0.9, 2.0])
    assert torch.equal(unit_interval(values, 2), torch.tensor([0, 0, 1, 2, 3, 3]) / 3)
    assert unit_interval(torch.tensor([0.2, 0.7]), 1).tolist() == [0, 1]


def test_block_floating_point_by_hand() -> None:
    # Three mantissa bits. First tile: the largest is 1 = 4/8 · 2^1, so steps of 2^(1-3). Second: 0.9 is beyond
    # 7/8 · 2^0, so its exponent is 1 as well. Third: 7/8 itself is not, so steps of 1/8. Fourth: nothing but zero.
    values = torch.tensor([[1.0, 0.3, 0.9, 0.1], [-0.6, 0.1, -0.4, 0.2], [0.875, 0.1, 0.0, 0.0], [-0.3, 0.0, 0.0, 0.0]])
    kept, exponents = block_floating_point(values, 3, 2)
    wanted = [[1.0, 0.25, 1.0, 0.0], [-0.5, 0.0, -0.5, 0.25], [0.875, 0.125, 0.0, 0.0], [-0.25, 0.0, 0.0, 0.0]]
    assert torch.equal(kept, torch.tensor(wanted))
    assert exponents.tolist() == [[1, 1], [0, 0]]


@pytest.mark.parametrize("rng", [None, torch.Generator().manual_seed(1)], ids=["nearest", "stochastic"])
@pytest.mark.parametrize("mantissa_bits", [1, 8, 16])
def test_mantissas_of_a_block_are_integers_that_fit_and_use_their_bits(mantissa_bits: int, rng) -> None:
    values = normal(50, 31) * 10.0 ** normal(50, 31, seed=1)
    kept, exponents = block_floating_point(values, mantissa_bits, 7, rng)
    assert exponents.shape == (8, 5)
    steps = torch.exp2((exponents - mantissa_bits).float()).repeat_interleave(7, 0).repeat_interleave(7, 1)[:50, :31]
    mantissas = kept / steps
    assert torch.equal(mantissas, mantissas.round()) and mantissas.abs().max() < 2**mantissa_bits
    assert ((kept - values).abs() <= steps * (0.5 if rng is None else 1)).all()
    if rng is None:
        largest = torch.nn.functional.max_pool2d(mantissas.abs()[None], 7, ceil_mode=True)[0]
        assert largest.min() >= 2 ** (mantissa_bits - 1)


def magnitudes(exponent_bits: int, mantissa_bits: int, top: int) -> Tensor:
    """All numbers of a format from its bits, as the standard reads them."""
    lowest, steps = top - (2**exponent_bits - 2), torch.arange(2**mantissa_bits) / 2**mantissa_bits
    of_each = [(steps + (bits > 0)) * 2.0 ** (lowest + max(bits - 1, 0)) for bits in range(2**exponent_bits)]
    return torch.cat(of_each)


@pytest.mark.parametrize(("exponent_bits", "mantissa_bits", "top"), [(1, 4, 0), (2, 1, 0), (3, 0, -5), (4, 3, 8)])
def test_a_minifloat_rounds_to_the_nearest_number_of_its_format(exponent_bits, mantissa_bits, top) -> None:
    numbers = magnitudes(exponent_bits, mantissa_bits, top)
    assert len(numbers.unique()) == 2 ** (exponent_bits + mantissa_bits)
    values = normal(2000) * 2.0 ** (top - 2)
    kept = minifloat(values, exponent_bits, mantissa_bits, top)
    nearest = (values.abs()[:, None] - numbers).abs().min(dim=1).values
    assert torch.isin(kept.abs(), numbers).all()
    assert torch.equal((values - kept).abs(), nearest)
    drawn = minifloat(values, exponent_bits, mantissa_bits, top, torch.Generator().manual_seed(0))
    assert torch.isin(drawn.abs(), numbers).all()


@pytest.mark.parametrize(
    ("dtype", "exponent_bits", "mantissa_bits", "top", "largest"),
    [(torch.float8_e4m3fn, 4, 3, 8, 448.0), (torch.float8_e5m2, 5, 2, 16, 57344.0)],
    ids=["e4m3", "e5m2"],
)
def test_a_minifloat_is_the_float8_of_torch(dtype, exponent_bits, mantissa_bits, top, largest) -> None:
    values = (normal(5000) * torch.exp2(normal(5000, seed=1) * 6)).clamp(-largest, largest)
    assert torch.equal(minifloat(values, exponent_bits, mantissa_bits, top), values.to(dtype).float())


SPREAD = torch.tensor([[-0.93, -0.5, -0.31, -0.02], [0.0, 0.07, 0.41, 0.93]])
FORMATS = {
    "integers": (lambda x, rng: rounded(10 * x, rng), 10 * SPREAD),
    "fixed point": (lambda x, rng: fixed_point(x, 3, 0.93, rng), SPREAD),
    "unit interval": (lambda x, rng: unit_interval(x.abs(), 2, rng), SPREAD.abs()),
    "block floating point": (lambda x, rng: block_floating_point(x.flatten(0, 1), 3, 2, rng)[0].view_as(x), SPREAD),
    "minifloat": (lambda x, rng: minifloat(x, 2, 1, 0, rng), SPREAD),
    "minifloat of powers of two": (lambda x, rng: minifloat(x, 3, 0, 0, rng), SPREAD),
    "a fiftieth of a step too high": (lambda x, rng: rounded(10 * x + 0.02, rng), 10 * SPREAD),
    "the nearest": (lambda x, rng: rounded(10 * x), 10 * SPREAD),
}
BIASED = ["a fiftieth of a step too high", "the nearest"]


@pytest.mark.parametrize("name", FORMATS)
def test_stochastic_rounding_has_no_bias_and_the_test_would_find_one(name: str) -> None:
    draw, wanted = FORMATS[name]
    p_value = mean_p_value(draw(copies(SPREAD), torch.Generator().manual_seed(0)), wanted)
    assert p_value < P_VALUE if name in BIASED else p_value > P_VALUE


@pytest.mark.parametrize(
    ("call", "fault"),
    [
        (lambda x: fixed_point(x, 1, 1.0), "num_bits must be at least 2, got 1"),
        (lambda x: unit_interval(x, 0), "num_bits must be at least 1, got 0"),
        (lambda x: block_floating_point(x, 0, 2), "mantissa_bits must be at least 1, got 0"),
        (lambda x: block_floating_point(x, 4, 0), "tile must be at least 1, got 0"),
        (lambda x: minifloat(x, 0, 2, 0), "exponent_bits must be at least 1, got 0"),
        (lambda x: minifloat(x, 2, -1, 0), "mantissa_bits must be at least 0, got -1"),
    ],
)
def test_bits_that_make_no_format_are_refused(call, fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        call(SPREAD)
