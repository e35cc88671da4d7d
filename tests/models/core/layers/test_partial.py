import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from models.core.layers.partial import PartialBlock, make_partial, make_whole


@pytest.fixture
def model(model: PreTrainedModel) -> PreTrainedModel:
    return model.train()


def states(model: PreTrainedModel, rows: list[list[int]], **settings: Tensor) -> Tensor:
    return model.model(input_ids=torch.tensor(rows), use_cache=False, **settings).last_hidden_state


ROWS = [[5, 6, 7, 8], [9, 8, 7, 6], [1, 2, 3, 4]]
# The second row holds two documents, so that each row has a mask of its own.
POSITIONS = torch.tensor([[0, 1, 2, 3], [0, 1, 0, 1], [0, 1, 2, 3]])


def test_rows_that_are_chosen_go_through_and_others_pass_by(model: PreTrainedModel) -> None:
    whole = states(model, ROWS, position_ids=POSITIONS)
    make_partial(model, lambda index, hidden: torch.tensor([0.0, 1.0, 1.0]))
    some = states(model, ROWS, position_ids=POSITIONS)
    assert torch.allclose(some[1:], whole[1:], atol=1e-5)
    assert torch.equal(some[0], model.model.norm(model.model.embed_tokens(torch.tensor(ROWS[0]))))


def test_no_row_and_every_row(model: PreTrainedModel) -> None:
    whole = states(model, ROWS)
    make_partial(model, lambda index, hidden: torch.full((3,), float(index == 0)))
    first = states(model, ROWS)
    make_whole(model)
    model.config.num_hidden_layers = 1
    assert torch.equal(first, states(model, ROWS)) and not torch.equal(first, whole)


def test_the_gradient_of_a_rows_share_is_what_the_block_adds(model: PreTrainedModel) -> None:
    hidden = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0))
    share = torch.ones(2, requires_grad=True)
    block = PartialBlock(torch.nn.Linear(4, 4), 0, lambda index, hidden: share)
    output = block(hidden)
    output.sum().backward()
    assert torch.allclose(share.grad, (block.block(hidden) - hidden).sum((1, 2)), atol=1e-5)


def test_in_evaluation_every_row_runs(model: PreTrainedModel) -> None:
    whole = states(model.eval(), ROWS)
    make_partial(model, lambda index, hidden: torch.zeros(3))
    assert torch.equal(states(model.eval(), ROWS), whole)
