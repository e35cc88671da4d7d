"""What the simulations of gate and trigger plant, by hand."""

import numpy as np
import pytest

from tests.benchmarks import gate
from tests.benchmarks.falls import _share_behind
from tests.benchmarks.gate import Case, draw

K = 3


def test_a_cluster_is_held_out_as_a_whole_and_shares_what_it_is_said_to() -> None:
    case = Case(0.0, cluster_size=30)
    means, weights, _ = draw(case, 4000, K, np.random.default_rng(0))
    assert {*np.unique(weights)} == {0, 1}
    assert weights.mean() == pytest.approx(gate.HELD_OUT, abs=0.01)
    assert means.std() == pytest.approx(gate.SIGMA * np.sqrt(gate.RHO + (1 - gate.RHO) / 30), rel=0.01)


def test_groups_are_of_unequal_sizes_and_the_planted_truth_is_that_of_groups() -> None:
    rng = np.random.default_rng(0)
    for case in (Case(0.0, largest=30), Case(0.0, largest=30, steeper=0.05)):
        differences, weights, requests = draw(case, 4000, K, rng)
        sizes, inside = requests[weights > 0], differences[weights > 0]
        assert weights.mean() == pytest.approx(gate.HELD_OUT, abs=0.01)
        assert (sizes.min(), np.median(sizes), sizes.max()) == (1, 2, 10)  # a twentieth of 200 conversations at most
        assert inside.mean() == pytest.approx(0, abs=0.005)
        assert (np.average(inside, weights=sizes) > 0.05) == (case.steeper > 0)


def test_what_places_give_follows_from_the_gain() -> None:
    gain = np.array([0.0, 0.5 + 0.25 + 0.125, 3.0])  # a chance of 0, 1/2 and 1
    assert _share_behind(gain, 0)[1:] == pytest.approx([1, 1])
    assert _share_behind(gain, 1) == pytest.approx([0, 0.375 / 0.875, 2 / 3])
    assert _share_behind(gain, 2) == pytest.approx([0, 0.125 / 0.875, 1 / 3])
