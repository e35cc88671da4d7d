"""SparseGPT against the closed form: what is left of a row must be its best fit to the output."""

import pytest
import torch

from models.core.checkpoints.sparsity import Pattern
from models.core.layers.linears import Gram
from models.prune import magnitude, sparsegpt, wanda

EXACT = sparsegpt.Params(dampening=1e-6)


def inputs(seed: int = 0, width: int = 6) -> torch.Tensor:
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(400, width, generator=rng) @ torch.randn(width, width, generator=rng)


def best_fit(weight: torch.Tensor, x: torch.Tensor, kept: list[int]) -> torch.Tensor:
    """Least squares of a row's output on the columns `kept`."""
    return torch.linalg.lstsq(x[:, kept], x @ weight).solution


def test_two_weights_worked_by_hand() -> None:
    # XᵀX = [[2, 1], [1, 1]], H⁻¹ = [[1, −1], [−1, 2]], U = [[1, −1], [0, 1]]: zeroing w₀ costs 1² / 1, zeroing w₁
    # costs 3² / 1. Without w₀ the rest must say x₀ + 3x₁ with x₁ alone: 3 + 1·⟨x₀, x₁⟩ / ⟨x₁, x₁⟩ = 4.
    x = torch.tensor([[1.0, 1.0], [1.0, 0.0]])
    pruned = sparsegpt.prune(torch.tensor([[1.0, 3.0]]), Gram(x), Pattern(sparsity=0.5), EXACT)
    torch.testing.assert_close(pruned, torch.tensor([[0.0, 4.0]]), rtol=1e-4, atol=1e-4)


def test_what_goes_first_is_made_up_for_by_all_the_others() -> None:
    x = inputs()
    weight = torch.tensor([[0.01, 2.0, -3.0, 4.0, 2.5, -2.0]])
    pruned = sparsegpt.prune(weight, Gram(x), Pattern(sparsity=1 / 6), EXACT)
    assert pruned[0, 0] == 0
    torch.testing.assert_close(pruned[0, 1:], best_fit(weight[0], x, [1, 2, 3, 4, 5]), rtol=1e-3, atol=1e-3)


def test_a_column_makes_up_only_for_those_before_it() -> None:
    x = inputs()
    weight = torch.tensor([[3.0, 2.0, -3.0, 4.0, 2.5, 0.001]])
    pruned = sparsegpt.prune(weight, Gram(x), Pattern(sparsity=1 / 6), EXACT)
    assert pruned[0].tolist() == [*weight[0, :5].tolist(), 0]


def test_blocks_change_when_the_mask_is_chosen_and_not_what_the_update_is() -> None:
    weight, x = torch.randn(16, 32, generator=torch.Generator().manual_seed(1)), inputs(width=32)
    pattern = Pattern(kept=2, group=4)  # whose mask is chosen group by group whatever the block is
    one = sparsegpt.prune(weight, Gram(x), pattern, sparsegpt.Params(block_size=32))
    many = sparsegpt.prune(weight, Gram(x), pattern, sparsegpt.Params(block_size=8))
    torch.testing.assert_close(one, many, rtol=1e-3, atol=1e-4)


def test_on_correlated_inputs_the_update_wins_over_masks_alone() -> None:
    rng = torch.Generator().manual_seed(1)
    weight, noise = torch.randn(64, 64, generator=rng), torch.randn(400, 64, generator=rng)
    x = torch.randn(400, 16, generator=rng) @ torch.randn(16, 64, generator=rng) + 0.3 * noise
    for pattern in (Pattern(sparsity=0.5), Pattern(kept=2, group=4)):
        errors = [
            float((x @ (method.prune(weight, Gram(x), pattern, method.Params()) - weight).T).square().sum())
            for method in (sparsegpt, wanda, magnitude)
        ]
        assert errors[0] < 0.5 * errors[1] < 0.5 * errors[2], errors


def test_weights_of_a_feature_that_never_fires_are_zeroed() -> None:
    x = inputs()
    x[:, 2] = 0
    pruned = sparsegpt.prune(torch.full((4, 6), 2.0), Gram(x), Pattern(sparsity=0.5), sparsegpt.Params())
    assert (pruned[:, 2] == 0).all() and pruned.isfinite().all()


def test_calibration_shorter_than_a_block_is_refused() -> None:
    with pytest.raises(ValueError, match="calibration has 5 tokens; wanted at least 6"):
        sparsegpt.prune(torch.ones(2, 6), Gram(inputs()[:5]), Pattern(sparsity=0.5), sparsegpt.Params())


def test_groups_that_would_straddle_blocks_are_refused() -> None:
    with pytest.raises(ValueError, match=r"block_size is 128, which 3 of 1:3 does not divide"):
        sparsegpt.prune(torch.ones(2, 6), Gram(inputs()), Pattern(kept=1, group=3), sparsegpt.Params())
