"""What samples under speculation: values repeated over drafted tokens, and steps that have none."""

import torch

from models.engines.vllm.patches.sampling import constrain_rows
from models.engines.vllm.redraft_vllm.sampling import expand


def test_values_are_repeated_over_the_drafted_tokens_in_place() -> None:
    output = torch.full((6,), -1.0)
    expand(output, torch.tensor([0.5, 0.0, 2.0]), torch.tensor([2, 3, 6], dtype=torch.int32), 0, 1)
    assert output.tolist() == [0.5, 0.5, 1.0, 2.0, 2.0, 2.0]


def test_a_request_without_drafted_tokens_takes_no_place() -> None:
    output = torch.zeros(2)
    expand(output, torch.tensor([3.0, 4.0]), torch.tensor([0, 2], dtype=torch.int32), 0, 1)
    assert output.tolist() == [4.0, 4.0]


def test_a_step_that_verifies_nothing_has_no_tokens_to_constrain() -> None:
    def largest_first(logits: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return logits.topk(int(k.max())).values

    assert constrain_rows(largest_first, torch.empty(0, 7), torch.empty(0)).shape == (0, 7)
    assert constrain_rows(largest_first, torch.tensor([[1.0, 3.0]]), torch.tensor([1])).tolist() == [[3.0]]
