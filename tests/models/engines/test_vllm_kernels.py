"""The kernel that repeats each request's value over its drafted tokens."""

import torch

from models.engines.vllm.kernels import expand


def test_values_are_repeated_over_the_drafted_tokens_in_place() -> None:
    output = torch.full((6,), -1.0)
    expand(output, torch.tensor([0.5, 0.0, 2.0]), torch.tensor([2, 3, 6], dtype=torch.int32), 0, 1)
    assert output.tolist() == [0.5, 0.5, 1.0, 2.0, 2.0, 2.0]


def test_a_request_without_drafted_tokens_takes_no_place() -> None:
    output = torch.zeros(2)
    expand(output, torch.tensor([3.0, 4.0]), torch.tensor([0, 2], dtype=torch.int32), 0, 1)
    assert output.tolist() == [4.0, 4.0]
