import numpy as np

from models.core.layers.vocabulary import choose_vocabulary


def test_the_vocabulary_is_the_most_frequent_tokens_in_ascending_order() -> None:
    assert choose_vocabulary(np.array([1, 9, 0, 9, 3]), 3).tolist() == [1, 3, 4]


def test_of_equally_frequent_tokens_the_smaller_id_is_kept() -> None:
    assert choose_vocabulary(np.array([0, 2, 0, 0]), 3).tolist() == [0, 1, 2]
