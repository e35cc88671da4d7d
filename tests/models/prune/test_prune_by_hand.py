"""Magnitude and Wanda by hand, SparseGPT against the closed form: its rest of a row is the best fit to the output."""

import pytest
import torch

from models.core.checkpoints.sparsity import Pattern
from models.core.layers.linears import Gram
from models.prune import magnitude, sparsegpt, wanda

EXACT = sparsegpt.Params(dampening=1e-6)
HALF = Pattern(sparsity=0.5)
WEIGHT = torch.tensor([[1.0, -2.0, 3.0, -4.0], [5.0, 6.0, -7.0, 8.0]])
NO_INPUTS = torch.empty(0, 4)


def test_the_smallest_weights_of_the_whole_layer_go_whatever_row_they_are_in() -> None:
    assert magnitude.prune(WEIGHT, NO_INPUTS, HALF, magnitude.Params()).tolist() == [[0, 0, 0, 0], [5, 6, -7, 8]]


def test_groups_lose_their_own_smallest_weights() -> None:
    pruned = magnitude.prune(WEIGHT, NO_INPUTS, Pattern(kept=1, group=2), magnitude.Params())
    assert pruned.tolist() == [[0, -2, 0, -4], [0, 6, 0, 8]]


def test_a_small_weight_on_a_loud_input_outlives_a_large_one_on_a_quiet_input() -> None:
    weight = torch.tensor([[4.0, 1.0, 1.0, 3.0], [4.0, 1.0, 2.0, 3.0]])
    inputs = torch.tensor([[0.1, 3.0, 1.0, 0.0], [0.0, 4.0, 1.0, 0.2]])  # norms 0.1, 5, √2, 0.2
    assert wanda.prune(weight, Gram(inputs), HALF, wanda.Params()).tolist() == [[0, 1, 1, 0], [0, 1, 2, 0]]


def test_every_row_loses_the_same_number_of_weights() -> None:
    weight = torch.tensor([[1.0, 2.0], [10.0, 20.0]])
    assert wanda.prune(weight, Gram(torch.ones(3, 2)), HALF, wanda.Params()).tolist() == [[0, 2], [0, 20]]


def test_on_inputs_of_equal_size_groups_are_pruned_by_magnitude() -> None:
    weight, pattern = torch.randn(8, 16, generator=torch.Generator().manual_seed(0)), Pattern(kept=2, group=4)
    inputs = Gram(torch.ones(4, 16))
    by_magnitude = magnitude.prune(weight, inputs, pattern, magnitude.Params())
    assert torch.equal(wanda.prune(weight, inputs, pattern, wanda.Params()), by_magnitude)


def inputs(seed: int = 0, width: int = 6) -> torch.Tensor:
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(400, width, generator=rng) @ torch.randn(width, width, generator=rng)


def best_fit(weight: torch.Tensor, x: torch.Tensor, kept: list[int]) -> torch.Tensor:
    """Least squares of a row's output on the columns `kept`."""
    return torch.linalg.lstsq(x[:, kept], x @ weight).solution


def test_sparsegpt_of_two_weights() -> None:
    # XᵀX = [[2, 1], [1, 1]], H⁻¹ = [[1, −1], [−1, 2]], U = [[1, −1], [0, 1]]: zeroing w₀ costs 1² / 1, zeroing w₁
    # costs 3² / 1. Without w₀ the rest must say x₀ + 3x₁ with x₁ alone: 3 + 1·⟨x₀, x₁⟩ / ⟨x₁, x₁⟩ = 4.
    x = torch.tensor([[1.0, 1.0], [1.0, 0.0]])
    pruned = sparsegpt.prune(torch.tensor([[1.0, 3.0]]), Gram(x), Pattern(sparsity=0.5), EXACT)
    torch.testing.assert_close(pruned, torch.tensor([[0.0, 4.0]]), rtol=1e-4, atol=1e-4)


def test_by_sparsegpt_what_goes_first_is_made_up_for_by_all_the_others() -> None:
    x = inputs()
    weight = torch.tensor([[0.01, 2.0, -3.0, 4.0, 2.5, -2.0]])
    pruned = sparsegpt.prune(weight, Gram(x), Pattern(sparsity=1 / 6), EXACT)
    assert pruned[0, 0] == 0
    torch.testing.assert_close(pruned[0, 1:], best_fit(weight[0], x, [1, 2, 3, 4, 5]), rtol=1e-3, atol=1e-3)


def test_by_sparsegpt_a_column_makes_up_only_for_those_before_it() -> None:
    x = inputs()
    weight = torch.tensor([[3.0, 2.0, -3.0, 4.0, 2.5, 0.001]])
    pruned = sparsegpt.prune(weight, Gram(x), Pattern(sparsity=1 / 6), EXACT)
    assert pruned[0].tolist() == [*weight[0, :5].tolist(), 0]


def test_sparsegpts_blocks_change_when_the_mask_is_chosen_and_not_what_the_update_is() -> None:
    weight, x = torch.randn(16, 32, generator=torch.Generator().manual_seed(1)), inputs(width=32)
    pattern = Pattern(kept=2, group=4)  # whose mask is chosen group by group whatever the block is
    one = sparsegpt.prune(weight, Gram(x), pattern, sparsegpt.Params(block_size=32))
    many = sparsegpt.prune(weight, Gram(x), pattern, sparsegpt.Params(block_size=8))
    torch.testing.assert_close(one, many, rtol=1e-3, atol=1e-4)


def test_on_correlated_inputs_sparsegpts_update_wins_over_masks_alone() -> None:
    rng = torch.Generator().manual_seed(1)
    weight, noise = torch.randn(64, 64, generator=rng), torch.randn(400, 64, generator=rng)
    x = torch.randn(400, 16, generator=rng) @ torch.randn(16, 64, generator=rng) + 0.3 * noise
    for pattern in (Pattern(sparsity=0.5), Pattern(kept=2, group=4)):
        errors = [
            float((x @ (method.prune(weight, Gram(x), pattern, method.Params()) - weight).T).square().sum())
            for method in (sparsegpt, wanda, magnitude)
        ]
        assert errors[0] < 0.5 * errors[1] < 0.5 * errors[2], errors


def test_by_sparsegpt_weights_of_a_feature_that_never_fires_are_zeroed() -> None:
    x = inputs()
    x[:, 2] = 0
    pruned = sparsegpt.prune(torch.full((4, 6), 2.0), Gram(x), Pattern(sparsity=0.5), sparsegpt.Params())
    assert (pruned[:, 2] == 0).all() and pruned.isfinite().all()


def test_sparsegpt_refuses_calibration_shorter_than_a_block() -> None:
    with pytest.raises(ValueError, match="calibration has 5 tokens; wanted at least 6"):
        sparsegpt.prune(torch.ones(2, 6), Gram(inputs()[:5]), Pattern(sparsity=0.5), sparsegpt.Params())


def test_sparsegpt_refuses_groups_that_would_straddle_blocks() -> None:
    with pytest.raises(ValueError, match=r"block_size is 128, which 3 of 1:3 does not divide"):
        sparsegpt.prune(torch.ones(2, 6), Gram(inputs()), Pattern(kept=1, group=3), sparsegpt.Params())
