import numpy as np
import pytest

from models.core.drafting.lookup import Answers, Match, NgramIndex, Sequence, Store

NOTHING = Match(0, [])


@pytest.mark.parametrize(
    ("token_ids", "num_tokens", "found"),
    [
        ([1, 2, 3, 4, 5, 9, 2, 3], 3, Match(2, [4, 5, 9])),
        ([1, 2, 3, 7, 0, 2, 3, 8, 0, 1, 2, 3], 1, Match(3, [7])),  # the longest wins over a later one
        ([2, 3, 7, 0, 2, 3, 8, 1, 2, 3], 1, Match(2, [8])),  # of equally long ones the latest
        ([5, 6, 7, 5, 6, 7, 5, 6], 7, Match(5, [7, 5, 6, 7, 5, 6, 7])),  # what repeats itself goes on doing so
        ([1, 2, 3, 4, 5, 6, 7, 8, 9, 6, 1, 2, 3, 4, 5, 6, 7, 8, 9], 1, Match(8, [6])),  # as long as is looked for
        ([], 4, NOTHING),
        ([1, 2, 3, 4], 4, NOTHING),
        ([1, 2, 1, 2], 0, NOTHING),
    ],
)
def test_what_followed_the_last_tokens_is_drafted(token_ids: list[int], num_tokens: int, found: Match) -> None:
    made = Sequence(2, 8)
    made.extend(token_ids)
    assert made.look_up(num_tokens) == found


def test_added_step_by_step_it_finds_what_a_search_of_the_whole_finds() -> None:
    tokens = np.random.default_rng(0).integers(0, 4, size=300).tolist()
    grown = Sequence(3, 5)
    for end, token in enumerate(tokens):
        grown.extend([token])
        known = tokens[: end + 1]
        starts = {
            size: [start for start in range(size, end + 1) if known[start - size : start] == known[-size:]]
            for size in range(3, 6)
        }
        best = max((size for size, found in starts.items() if found), default=None)
        if best is None:
            assert grown.look_up(1) == NOTHING
        elif len(starts[3]) <= 16:
            assert grown.look_up(1) == Match(best, [known[starts[best][-1]]])


def test_sizes_that_can_not_be_are_refused() -> None:
    with pytest.raises(ValueError, match="wanted 1 ≤ shortest ≤ longest; got 3 and 2"):
        Sequence(3, 2)


def answered(library: NgramIndex, request_id: str, key: str, token_ids: list[int]) -> None:
    """Have a request end after these tokens, with every other that runs."""
    library.sequence(request_id, key, 1).extend(token_ids)
    library.close_all_but([])


def looked_up(library: NgramIndex, request_id: str, key: str, token_ids: list[int], num_tokens: int = 1) -> Match:
    sequence = library.sequence(request_id, key, 1)
    sequence.extend(token_ids)
    return sequence.look_up(num_tokens)


@pytest.fixture
def library() -> NgramIndex:
    return NgramIndex(shortest=2, longest=8, capacity=100)


def test_recent_answers_of_the_same_key_are_looked_up_and_of_another_never(library: NgramIndex) -> None:
    answered(library, "first", "alice", [1, 2, 10, 11, 12, 13])
    assert looked_up(library, "second", "alice", [10, 11], 2) == Match(2, [12, 13])
    assert looked_up(library, "third", "bob", [10, 11], 2) == NOTHING


def test_an_answer_of_a_running_request_is_not_looked_up_by_others(library: NgramIndex) -> None:
    library.sequence("first", "alice", 1).extend([10, 11, 12])
    second = library.sequence("second", "alice", 1)
    second.extend([10, 11])
    library.close_all_but(["first", "second"])
    assert second.look_up(1) == NOTHING


def test_without_capacity_only_the_sequence_itself_is_looked_up() -> None:
    library = NgramIndex(shortest=2, longest=8, capacity=0)
    answered(library, "first", "alice", [10, 11, 12])
    assert looked_up(library, "second", "alice", [10, 11]) == NOTHING


def test_no_more_than_the_capacity_is_remembered_and_the_oldest_goes_first() -> None:
    answers = Answers(shortest=2, capacity=8)
    for start in (10, 20, 30):
        answers.add(list(range(start, start + 4)))
    held = [text.token_ids for text in answers.texts()]
    assert held == [[30, 31, 32, 33], [20, 21, 22, 23]]
    answers.add(list(range(100)))
    assert sum(len(text.token_ids) for text in answers.texts()) <= 8


def test_keys_beyond_the_limit_are_forgotten_the_least_recent_first() -> None:
    library = NgramIndex(shortest=2, longest=8, capacity=100, max_keys=2)
    for number, key in enumerate(["alice", "bob", "carol"]):
        answered(library, f"of-{key}", key, [10 * number, 10 * number + 1, 10 * number + 2])
    assert looked_up(library, "again-bob", "bob", [10, 11]) == Match(2, [12])
    assert looked_up(library, "again-carol", "carol", [20, 21]) == Match(2, [22])
    assert looked_up(library, "again-alice", "alice", [0, 1]) == NOTHING


def test_forgetting_leaves_nothing_of_other_requests(library: NgramIndex) -> None:
    answered(library, "first", "alice", [10, 11, 12])
    second = library.sequence("second", "alice", 1)
    assert library.forget() == 3
    second.extend([10, 11])
    assert second.look_up(1) == NOTHING
    library.close_all_but([])  # it ended before, and nobody had noticed yet
    assert looked_up(library, "third", "alice", [10]) == NOTHING
    answered(library, "third", "alice", [11, 12])
    assert looked_up(library, "fourth", "alice", [10, 11]) == Match(2, [12])


def test_a_store_gives_what_followed_the_longest_match_the_latest_first() -> None:
    store = Store([[1, 2, 3], [5, 1, 2, 4, 6], [1, 2, 7, 8, 9]], shortest=1)
    assert store.continuations([0, 1, 2], 9, 2) == [[7, 8], [4, 6], [3]]
    assert store.continuations([0, 5, 1, 2], 9, 9) == [[4, 6]]
    assert store.continuations([0, 5, 1, 2], 2, 9) == [[7, 8, 9], [4, 6], [3]]
    assert store.continuations([6, 1], 9, 9) == [[2, 7, 8, 9], [2, 4, 6], [2, 3]]  # 6 and 1 stand in two texts


@pytest.mark.parametrize("end", [[], [77], [9]])
def test_a_store_that_holds_no_such_ending_gives_nothing_that_follows(end: list[int]) -> None:
    assert not any(Store([[1, 2, 9]], shortest=1).continuations(end, 9, 9))
    assert Store([], shortest=1).continuations(end, 9, 9) == []
