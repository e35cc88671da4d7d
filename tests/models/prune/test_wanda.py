import torch

from models.core.checkpoints.sparsity import Pattern
from models.core.layers.linears import Gram
from models.prune import magnitude, wanda


def test_a_small_weight_on_a_loud_input_outlives_a_large_one_on_a_quiet_input() -> None:
    weight = torch.tensor([[4.0, 1.0, 1.0, 3.0], [4.0, 1.0, 2.0, 3.0]])
    inputs = torch.tensor([[0.1, 3.0, 1.0, 0.0], [0.0, 4.0, 1.0, 0.2]])  # norms 0.1, 5, √2, 0.2
    pruned = wanda.prune(weight, Gram(inputs), Pattern(sparsity=0.5), wanda.Params())
    assert pruned.tolist() == [[0, 1, 1, 0], [0, 1, 2, 0]]


def test_every_row_loses_the_same_number_of_weights() -> None:
    weight = torch.tensor([[1.0, 2.0], [10.0, 20.0]])
    pruned = wanda.prune(weight, Gram(torch.ones(3, 2)), Pattern(sparsity=0.5), wanda.Params())
    assert pruned.tolist() == [[0, 2], [0, 20]]


def test_on_inputs_of_equal_size_groups_are_pruned_by_magnitude() -> None:
    weight = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))
    pattern = Pattern(kept=2, group=4)
    assert torch.equal(
        wanda.prune(weight, Gram(torch.ones(4, 16)), pattern, wanda.Params()),
        magnitude.prune(weight, Gram(torch.ones(4, 16)), pattern, magnitude.Params()),
    )
