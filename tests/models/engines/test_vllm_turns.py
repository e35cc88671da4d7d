from itertools import pairwise

import pytest

from models.engines.vllm.planning import NUM_CYCLES, MeasuredStep, cycles, turns


@pytest.mark.parametrize(("most", "wanted"), [(3, [1, 2, 3]), (48, [1, 2, 4, 8, 16, 32, 48]), (500, [*NUM_CYCLES])])
def test_it_is_measured_with_as_many_sequences_as_the_engine_runs(most: int, wanted: list[int]) -> None:
    assert [*cycles(most)] == wanted


def test_what_is_drafted_in_a_step_is_verified_in_the_next_so_that_each_kind_of_step_is_timed_once_a_cycle() -> None:
    """Rows of a step are its sequences and what the step before drafted; passes are its own."""
    kinds = turns(16, 8)
    assert kinds == [
        MeasuredStep(passes=True),
        MeasuredStep(False, 4, 1),
        MeasuredStep(False, 16, 1),
        MeasuredStep(False, 16, 8),
        MeasuredStep(),
    ]
    steps = [(16 + last.num_filled * last.num_tokens, one.passes) for last, one in pairwise([kinds[-1], *kinds])]
    assert steps == [(16, True), (16, False), (20, False), (32, False), (144, False)]


def test_with_few_sequences_or_no_look_up_there_are_fewer_kinds() -> None:
    assert turns(1, 0) == [MeasuredStep(passes=True), MeasuredStep(False, 1, 1), MeasuredStep()]
    assert turns(64, 8) == [
        MeasuredStep(passes=True),
        MeasuredStep(False, 16, 1),
        MeasuredStep(False, 64, 1),
        MeasuredStep(),
    ]
