import pytest
import torch

from models.core.drafting.subset_search import Subset, SubsetSearch

WANTED = frozenset({1, 4, 5, 9, 12})


def likeness(subset: Subset) -> float:
    return -float(len(subset ^ WANTED))


def searched(size: int | None, guessing: bool, seed: int) -> SubsetSearch:
    search = SubsetSearch(14, torch.Generator().manual_seed(seed), size)
    for trial in range(45):
        subset = search.promising() if guessing and trial >= 10 else search.random()
        search.note(subset, likeness(subset))
    return search


@pytest.mark.slow
@pytest.mark.parametrize("size", [None, 5])
def test_the_search_finds_what_as_many_random_subsets_do_not(size: int | None) -> None:
    assert [searched(size, True, seed).best for seed in range(2)] == [(WANTED, 0.0)] * 2
    assert max(searched(size, False, seed).best[1] for seed in range(3)) < 0


def test_what_is_likely_good_or_unknown_is_tried_next() -> None:
    search = SubsetSearch(8, torch.Generator().manual_seed(0), size=1)
    search.note(frozenset({0}), 1.0)
    search.note(frozenset({1}), 1.0)
    [mean] = search._bounds([frozenset({0})])
    [unknown] = search._bounds([frozenset({5})])
    assert -0.1 < mean < 0.4  # of equal values, all that is known is the mean
    # By hand: k(a, b) = exp(−4/8 · 2) = 0.368, so the two others explain 2 · 0.368² / (1.01 + 0.368) of the variance.
    torch.testing.assert_close(float(unknown), 2.5 * (1 - 2 * 0.36788**2 / 1.37788) ** 0.5, rtol=1e-3, atol=1e-3)


def test_when_all_was_tried_one_comes_again() -> None:
    search = SubsetSearch(2, torch.Generator().manual_seed(0))
    for subset in ({0}, {1}, {0, 1}):
        search.note(frozenset(subset), 0.0)
    assert search.promising() in {frozenset({0}), frozenset({1}), frozenset({0, 1})}
    assert search.best == (frozenset({0}), 0.0)


def test_subsets_have_the_size_that_was_asked_for() -> None:
    search = SubsetSearch(6, torch.Generator().manual_seed(0), size=3)
    for _ in range(10):
        subset = search.promising()
        assert len(subset) == 3
        search.note(subset, float(sum(subset)))
    free = SubsetSearch(6, torch.Generator().manual_seed(0))
    assert {len(free.random()) for _ in range(100)} == {1, 2, 3, 4, 5, 6}


@pytest.mark.parametrize(("num_items", "size"), [(0, None), (3, 4), (3, 0)])
def test_a_size_that_no_subset_has_is_refused(num_items: int, size: int | None) -> None:
    with pytest.raises(ValueError, match=f"wanted items, and subsets of 1 to {num_items} of them; got size {size}"):
        SubsetSearch(num_items, torch.Generator(), size)
