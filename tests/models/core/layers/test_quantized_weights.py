import pytest
import torch

from models.core.layers.quantized_weights import FILE, GROUP, Grid, load, rounded, save, stacked
from tests.models.core.layers.published import random_grid


def test_a_weight_is_scale_times_integer_plus_the_least_of_its_32() -> None:
    values = torch.zeros(1, 64, dtype=torch.uint8)
    values[0, 0], values[0, 33] = 15, 2
    grid = Grid(values, torch.tensor([[0.5, 0.25]]).half(), torch.tensor([[-1.0, 3.0]]).half())
    assert grid.floats()[0, [0, 1, 32, 33]].tolist() == [6.5, -1.0, 3.0, 3.5]


def test_grids_come_back_as_they_were_written_two_integers_of_four_bits_in_a_byte(tmp_path) -> None:
    grids = {"a.weight": random_grid(8, 64, 4), "b.weight": random_grid(8, 64, 8)}
    assert load(tmp_path) == {}
    save(grids, tmp_path)
    found = load(tmp_path)
    assert found.keys() == grids.keys()
    for name, grid in grids.items():
        assert all(torch.equal(*parts) for parts in zip(found[name], grid, strict=True) if parts[0] is not None)
    assert (found["a.weight"].least is None, found["b.weight"].least is None) == (False, True)
    assert (tmp_path / FILE).stat().st_size < 8 * 64 * 1.5 + 2500


@pytest.mark.parametrize("size", [1e-3, 1.0, 1e3])
def test_floats_are_rounded_to_255_steps_of_each_groups_largest(size: float) -> None:
    weight = size * torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    weight[2, :GROUP] = 0
    grid = rounded(weight)
    assert grid.values.dtype == torch.int8
    assert grid.least is None
    largest = weight.unflatten(1, (-1, GROUP)).abs().amax(dim=2).repeat_interleave(GROUP, dim=1)
    assert bool(((grid.floats() - weight).abs() <= largest * 1.001 / 254).all())
    assert bool((grid.floats()[2, :GROUP] == 0).all())


def test_a_grid_holds_the_weights_it_says_in_any_number_format_and_no_others() -> None:
    grid = random_grid(8, 64, 4)
    weight = grid.floats()
    assert grid.holds(weight)
    assert grid.holds(weight.bfloat16())
    weight[3, 3] += 0.01
    assert not grid.holds(weight)
    assert not grid.holds(weight[:4])


def test_stacked_outputs_are_those_of_each() -> None:
    one, other = random_grid(8, 64, 4, seed=1), random_grid(4, 64, 4, seed=2)
    assert torch.equal(stacked([one, other]).floats(), torch.cat((one.floats(), other.floats())))
    with pytest.raises(ValueError, match="grids of one kind"):
        stacked([one, random_grid(8, 64, 8)])
