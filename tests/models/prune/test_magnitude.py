import torch

from models.core.checkpoints.sparsity import Pattern
from models.prune import magnitude

WEIGHT = torch.tensor([[1.0, -2.0, 3.0, -4.0], [5.0, 6.0, -7.0, 8.0]])


def test_the_smallest_weights_of_the_whole_layer_go_whatever_row_they_are_in() -> None:
    pruned = magnitude.prune(WEIGHT, torch.empty(0, 4), Pattern(sparsity=0.5), magnitude.Params())
    assert pruned.tolist() == [[0, 0, 0, 0], [5, 6, -7, 8]]


def test_groups_lose_their_own_smallest_weights() -> None:
    pruned = magnitude.prune(WEIGHT, torch.empty(0, 4), Pattern(kept=1, group=2), magnitude.Params())
    assert pruned.tolist() == [[0, -2, 0, -4], [0, 6, 0, 8]]
