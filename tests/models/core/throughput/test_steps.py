"""What steps give and take where chains may end by themselves, by hand."""

import pytest

from models.core.throughput.steps import Group, Line, options_of

LINE = Line(1, [1, 2, 3, 4], [10.0, 11.0, 12.0, 13.0], pass_ms=0.5)
CHANCES = [0.6, 0.3, 0.2]


def test_rows_and_passes_are_those_that_chains_come_to() -> None:
    whole, ended = (
        options_of(LINE, [Group(1, "code", True, CHANCES, [], made)], 3, None)[0] for made in ((), (1.0, 0.5, 0.25))
    )
    assert whole[3].longest == ended[3].longest == {("code", "head", 0): 3}
    assert whole[3].tokens == ended[3].tokens == pytest.approx(2.1)
    assert (whole[3].rows, ended[3].rows) == (4, 2.75)
    assert whole[3].ms == pytest.approx(13 + 1.5)
    assert ended[3].ms == pytest.approx(11.75 + 0.5 * 1.75)
    assert whole[0] == ended[0]


def test_a_row_that_is_seldom_there_is_verified_where_it_would_not_pay_otherwise() -> None:
    chances = [0.6, 0.05]
    for made, length in (((), 1), ((1.0, 0.2), 2)):
        option = options_of(LINE, [Group(1, "code", True, chances, [], made)], 2, None)[0][2]
        assert option.longest == {("code", "head", 0): length}


def test_passes_go_on_while_one_of_the_chains_does() -> None:
    line = LINE._replace(num_sequences=2, rows=[2, 4, 6, 8])
    groups = [
        Group(1, "code", True, CHANCES, [], (1.0, 0.5, 0.5)),
        Group(1, "chat", True, CHANCES, [], (1.0, 0.5, 0.0)),
    ]
    option = options_of(line, groups, 3, None)[0][3]
    assert option.ms - line.target_ms(option.rows) == pytest.approx(0.5 * (1 + 0.75 + 0.5), abs=0.05)
    groups[1] = groups[1]._replace(made=())
    assert options_of(line, groups, 3, None)[0][3].ms > option.ms
