import pytest

from models.core.throughput.cost import Cost, Time
from models.lengths import View
from models.lengths.hardware_aware import Params, num_draft_tokens
from models.trees import sequoia

TREE = sequoia.Params(acceptance=(0.5, 0.2, 0.1), max_depth=4)
PARAMS = Params(tree=TREE)
SHALLOW = Params(tree=TREE.model_copy(update={"max_depth": 2}))  # no size takes a pass more than a smaller one
MANY = ((1, 1),) * 9


def timed(rows: dict[int, float], pass_ms: float) -> Cost:
    """A machine on which so many rows take so many ms."""
    plain = [Time(1, number, 0, ms) for number, ms in rows.items()]
    return Cost.measured([*plain, Time(1, 2, 1, rows[2] + pass_ms)])


def view(cost: Cost, steps: tuple[tuple[int, int], ...] = MANY, limit: int = 8) -> View:
    return View(limit=limit, steps=steps, num_running=1, cost=cost)


ROWS = (1, 2, 3, 5, 9)


@pytest.mark.parametrize("per_row_ms", [0.0, 1.0, 3.0])
def test_the_size_is_the_one_of_the_most_tokens_a_second(per_row_ms: float) -> None:
    times = {number: 10.0 + per_row_ms * (number - 1) for number in ROWS}
    found = num_draft_tokens(view(timed(times, 0.3)), PARAMS)
    speeds = {}
    for size in range(9):
        shape = sequoia.shape(size, TREE)
        step_ms = 10.0 + per_row_ms * size + 0.3 * len(shape.levels)
        speeds[size] = (1 + sequoia.expected_accepted(shape, TREE.acceptance)) / step_ms
    assert found == max(speeds, key=speeds.__getitem__)


def test_where_rows_are_free_the_largest_tree_is_drafted_and_where_they_cost_a_pass_none() -> None:
    assert num_draft_tokens(view(timed(dict.fromkeys(ROWS, 10.0), 0.3)), SHALLOW) == 8
    assert num_draft_tokens(view(timed({number: 10.0 * number for number in ROWS}, 0.3)), SHALLOW) == 0


def test_sizes_that_double_are_tried_once_until_they_are_timed() -> None:
    asked = [num_draft_tokens(view(Cost(), steps=((0, 0),) * number, limit=6), PARAMS) for number in range(5)]
    assert asked == [0, 1, 2, 4, 6]
    assert num_draft_tokens(view(Cost(), steps=(), limit=0), PARAMS) == 0
    cost = timed(dict.fromkeys(ROWS, 10.0), 0.3)
    assert {num_draft_tokens(view(cost, steps=((0, 0),) * number), SHALLOW) for number in range(5)} == {8}


def test_rows_that_the_draft_has_read_beside_the_tokens_cost_what_rows_cost() -> None:
    """Of 3 tokens a step without a draft and 4 of 4 nodes, none pays with 9 rows beside that a tree has."""
    cost = timed({1: 10.0, 2: 10.0, 3: 10.0, 5: 10.0, 9: 10.0, 18: 40.0}, 0.0)
    beside = View(limit=8, steps=MANY, num_running=1, cost=cost, vectors=(0, *[9] * 8))
    assert num_draft_tokens(view(cost), SHALLOW) == 8
    assert beside.num_rows(8) == 18
    assert num_draft_tokens(beside, SHALLOW) < 8
