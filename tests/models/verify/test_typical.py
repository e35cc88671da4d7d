"""Typical acceptance, by hand."""

from functools import partial

import pytest
import torch

from models.core.drafting.multi_draft import exact_outcome
from models.core.drafting.proposal import Proposal
from models.verify import Verified
from models.verify.typical import Params, choose, count_accepted, expected_accepted, verify

FLAT = [0.25, 0.25, 0.25, 0.25]  # exp(−H) is 1/4: the bar is min(0.09, 0.3 / 4) = 0.075, and all pass
SURE = [0.91, 0.04, 0.04, 0.01]  # exp(−H) is 0.67: the bar is 0.09


def run(draft: list[int], parents: tuple[int, ...], p: list[list[float]], count: int = 1) -> Verified:
    """Verify one tree `count` times."""
    laws = torch.tensor([p] * count)
    return verify(Proposal(torch.tensor([draft] * count), parents), laws, torch.Generator().manual_seed(0), Params())


def test_the_bar_follows_the_entropy() -> None:
    assert run([3], (-1,), [FLAT, SURE]).num_accepted.tolist() == [1]
    assert run([1], (-1,), [SURE, SURE]).num_accepted.tolist() == [0]
    assert run([0], (-1,), [SURE, SURE]).num_accepted.tolist() == [1]


def test_a_token_that_the_target_excludes_is_not_kept() -> None:
    assert run([2], (-1,), [[0.5, 0.5, 0.0, 0.0], FLAT]).num_accepted.tolist() == [0]


def test_the_longest_path_is_kept_and_of_equal_ones_the_likeliest() -> None:
    p = [[0.6, 0.4, 0.0, 0.0], SURE, FLAT, FLAT, FLAT]
    # 0 is likelier than 1, but only 1 goes on.
    assert run([0, 1, 1, 2], (-1, -1, 0, 1), p).path.tolist() == [[1, 3]]
    # Of two paths of one token each the likelier, wherever it stands.
    assert run([1, 0, 2, 2], (-1, -1, 0, 1), [*p[:1], SURE, SURE, FLAT, FLAT]).path.tolist() == [[1, -1]]


def test_a_path_is_cut_where_a_token_does_not_pass() -> None:
    assert run([1, 0, 0], (-1, 0, 1), [SURE, FLAT, FLAT, FLAT]).num_accepted.tolist() == [0]


def test_the_token_after_the_path_is_drawn_from_the_target() -> None:
    verified = run([1], (-1,), [SURE, FLAT], count=20_000)
    assert (verified.tokens[:, 0].bincount(minlength=4) / 20_000).tolist() == pytest.approx(SURE, abs=0.009)
    nothing = verify(
        Proposal(torch.empty(20_000, 0, dtype=torch.int64), ()),
        torch.tensor([[FLAT]] * 20_000),
        torch.Generator().manual_seed(1),
        Params(),
    )
    assert (nothing.tokens[:, 0].bincount(minlength=4) / 20_000).tolist() == pytest.approx(FLAT, abs=0.013)


def test_what_is_lost_by_hand() -> None:
    # Tokens 0 and 1 pass, 2 does not. Emitted: q of 0 and 1, and p for the 0.2 that were not kept.
    p = torch.tensor([0.5, 0.45, 0.05], dtype=torch.float64)
    q = torch.tensor([0.1, 0.7, 0.2], dtype=torch.float64)
    outcome = exact_outcome(partial(choose, params=Params()), p, q, 1, "independent")
    assert float(outcome.kept) == pytest.approx(0.8)
    assert outcome.emitted.tolist() == pytest.approx([0.1 + 0.1, 0.7 + 0.09, 0.01])
    assert float(outcome.lost(p)) == pytest.approx(0.34)


def test_nothing_is_lost_where_one_token_passes_and_has_all_of_p() -> None:
    p = torch.tensor([0.0, 1.0, 0.0], dtype=torch.float64)
    q = torch.tensor([0.1, 0.7, 0.2], dtype=torch.float64)
    assert float(exact_outcome(partial(choose, params=Params()), p, q, 2, "independent").lost(p)) < 1e-12


def test_a_lower_bar_keeps_more() -> None:
    low, high = Params(epsilon=0.01), Params(epsilon=0.5, delta=1)
    p, q = torch.tensor(SURE, dtype=torch.float64), torch.tensor(FLAT, dtype=torch.float64)
    kept = [float(exact_outcome(partial(choose, params=one), p, q, 1, "independent").kept) for one in (low, high)]
    assert kept == pytest.approx([0.75, 0.25])


def test_what_is_expected_of_an_answer_by_hand() -> None:
    # At 0 (drafted 0.5, of which the target says 0.5) a step goes past 0.5 / 0.5 times, and both places keep all.
    said, p = torch.tensor([[0, 1]]), torch.tensor([[[0.5, 0.5], [0.98, 0.02]]])
    q = torch.tensor([[[0.5, 0.5], [0.6, 0.4]]])
    assert expected_accepted(said, q, p, Params()).tolist() == pytest.approx([1 + 0.6])


def test_ids_do_not_tell_what_was_accepted() -> None:
    with pytest.raises(ValueError, match="typical may emit a token that it rejected"):
        count_accepted([1], [1])
