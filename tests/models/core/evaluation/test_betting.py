import itertools
import math

import numpy as np
import pytest

from models.core.evaluation.betting import MeanTest, log_growth, log_wealth

VALUES = [0.5, -0.25, 0.125, 0.0, 0.375, -0.0625, 0.25, 0.5, -0.5, 0.1875] * 3


@pytest.mark.parametrize(("mean", "expected"), [(-0.25, 9.53354278), (0.0, 1.50350261), (0.125, -0.79093470)])
def test_the_wealth_is_that_of_the_authors_own_package(mean: float, expected: float) -> None:
    # log of confseq 0.0.11's betting.diversified_betting_mart of (x + 1) / 2, with bets b / m, theta = trunc_scale = 1.
    assert MeanTest(bound=1).after(VALUES).log_wealth(mean) == pytest.approx(expected, abs=1e-8)


def test_on_average_nobody_gets_rich_by_betting_on_a_mean_that_is_not_there() -> None:
    # All outcomes of five values, whose means differ and average 0: the expected wealth, exactly.
    laws = [{1.0: 0.5, -1.0: 0.5}, {0.5: 2 / 3, -1.0: 1 / 3}, {1.0: 0.3, 0: 0.4, -1.0: 0.3}, {0.25: 1.0}, {-0.25: 1.0}]
    expected = 0.0
    for outcome in itertools.product(*(law.items() for law in laws)):
        values, chances = zip(*outcome, strict=True)
        expected += math.prod(chances) * math.exp(MeanTest(bound=1).after(values).log_wealth())
    assert 0.9 < expected <= 1


def test_a_value_of_half_a_weight_counts_half_and_two_of_them_as_one() -> None:
    test = MeanTest(bound=1)
    assert test.after(VALUES * 2, [0.5] * 60) == test.after(VALUES)
    assert test.after(VALUES, [0.5] * 30).weight == 15


def test_the_order_of_values_and_a_rest_on_disk_make_no_difference() -> None:
    test = MeanTest(bound=1).after(VALUES[::-1][:7])
    again = MeanTest.model_validate_json(test.model_dump_json()).after(VALUES[::-1][7:])
    assert again == MeanTest(bound=1).after(VALUES)


def test_what_is_kept_stays_small() -> None:
    rng, test = np.random.default_rng(0), MeanTest(bound=3)
    for _ in range(100):
        test = test.after(np.clip(rng.normal(0.1, 0.3, 500), -3, 3).tolist())
    assert test.weight == 50_000
    assert len(test.model_dump_json()) < 20_000


def test_rounding_only_ever_widens_the_bounds() -> None:
    rng = np.random.default_rng(1)
    values = np.clip(rng.normal(0.2, 0.3, 400), -3, 3)
    test = MeanTest(bound=3).after(values.tolist())
    exact = [
        float(log_wealth(log_growth(sign * values, np.ones(400), sign * bound, 3)))
        for sign, bound in ((1, test.lower(0.05)), (-1, test.upper(0.05)))
    ]
    assert all(wealth >= -math.log(0.05) for wealth in exact)
    assert test.lower(0.05) < values.mean() < test.upper(0.05)
    assert test.mean == pytest.approx(values.mean())


def test_nothing_is_known_before_the_first_value() -> None:
    test = MeanTest(bound=3)
    assert (test.lower(0.05), test.upper(0.05), test.mean, test.log_wealth()) == (-3, 3, 0, pytest.approx(0))


@pytest.mark.slow
@pytest.mark.parametrize("cluster_size", [1, 25])
def test_a_mean_of_zero_is_left_no_more_often_than_allowed_though_one_looks_at_each_value(cluster_size: int) -> None:
    rng, num_runs, num_values = np.random.default_rng(2), 1000, 1000
    values = np.where(rng.random((num_runs, num_values)) < 0.1, -2.7, 0.3)  # gains mostly, and sometimes loses much
    values += rng.choice([-0.3, 0.3], (num_runs, num_values // cluster_size)).repeat(cluster_size, 1)
    values = values.reshape(num_runs, -1, cluster_size).mean(axis=2)[:, :, None]
    for signed in (values, -values):
        growth = log_growth(signed, np.ones_like(signed), 0.0, 3.0).cumsum(axis=1)
        left = (log_wealth(growth).max(axis=1) >= -math.log(0.05)).mean()
        assert left <= 0.05 + 3 * (0.05 * 0.95 / num_runs) ** 0.5


def test_what_is_no_value_is_refused() -> None:
    test = MeanTest(bound=1)
    for values, weights in (([1.5], [1.0]), ([float("nan")], [1.0]), ([0.0], [1.5]), ([0.0], [-0.1])):
        with pytest.raises(ValueError, match="wanted a value in ±1 and a weight in"):
            test.after(values, weights)
    with pytest.raises(ValueError, match=r"counts.4096"):
        MeanTest.model_validate({"bound": 1, "counts": {"4096": 1.0}})
