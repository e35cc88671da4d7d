from models.trees import static


def test_every_node_of_a_level_has_as_many_children() -> None:
    shape = static.shape(20, static.Params(widths=(2, 2, 1)))
    assert shape.parents == (-1, -1, 0, 0, 1, 1, 2, 3, 4, 5)
    assert shape.ranks == (0, 1, 0, 1, 0, 1, 0, 0, 0, 0)
    assert shape.levels == [[0, 1], [2, 3, 4, 5], [6, 7, 8, 9]]


def test_a_level_that_is_cut_loses_the_last_ranks_first() -> None:
    shape = static.shape(5, static.Params(widths=(2, 2, 1)))
    assert shape == ((-1, -1, 0, 0, 1), (0, 1, 0, 1, 0))
