import numpy as np
import pytest

from models.core.throughput.running import FIRST_GUESS, MAX_DOMAINS, Acceptance


def seen(chance: float, steps: int, acceptance: Acceptance | None = None, domain: str = "code") -> Acceptance:
    """Show as many steps of one token each, accepted at a chance."""
    acceptance = acceptance or Acceptance()
    for number in range(steps):
        acceptance.see(domain, "head", 1, int(int((number + 1) * chance) > int(number * chance)))
    return acceptance


def test_what_is_accepted_is_expected_place_by_place() -> None:
    acceptance = Acceptance(memory=1_000_000)
    for accepted in (0, 1, 2, 3) * 200:
        acceptance.see("code", "head", 3, accepted)
    # Of 4 steps 3 reach the second place, 2 the third.
    assert acceptance.chances("code", "head", 3) == pytest.approx([3 / 4, 2 / 3, 1 / 2], abs=0.01)
    assert acceptance.expected("code", "head", 3) == pytest.approx(3 / 4 + 2 / 4 + 1 / 4, abs=0.01)


def test_a_swapped_draft_begins_with_what_the_gate_saw_of_it() -> None:
    acceptance = seen(0.1, 400)
    acceptance.start({"code": [0.6, 0.3], "chat": [0.4, 0.0]})
    assert acceptance.chances("code", "head", 3) == pytest.approx([0.6, 0.5, 0.5])
    assert acceptance.chances("chat", "head", 2) == pytest.approx([0.4, 0.0])
    assert acceptance.chances("other", "head", 1) == pytest.approx([0.5])
    assert acceptance.num_swaps == 1


def test_a_gate_that_was_wrong_is_forgotten_within_200_steps() -> None:
    acceptance = Acceptance()
    acceptance.start({"code": [0.6]})
    assert seen(0.1, 200, acceptance).chances("code", "head", 1)[0] == pytest.approx(0.1, abs=0.02)


def test_a_domain_never_seen_begins_like_the_others_but_no_lower_than_a_guess() -> None:
    assert seen(0.9, 400).chances("chat", "head", 1)[0] == pytest.approx(0.9, abs=0.02)
    assert seen(0.1, 400).chances("chat", "head", 1)[0] == FIRST_GUESS["head", 0]


def test_changed_traffic_is_noticed_long_before_the_memory_has_passed() -> None:
    acceptance = seen(0.1, 100, seen(0.6, 2000))
    assert acceptance.chances("code", "head", 1)[0] < 0.3


def test_traffic_that_stays_is_seldom_taken_for_changed() -> None:
    rng, wrong, runs = np.random.default_rng(0), 0, 40
    for _ in range(runs):
        acceptance = Acceptance()
        for accepted in rng.random(2000) < 0.3:
            acceptance.see("code", "head", 1, int(accepted))
        wrong += abs(acceptance.chances("code", "head", 1)[0] - 0.3) > 0.06
    print(f"estimates off by more than 0.06 after 2,000 steps: {wrong} of {runs}")
    assert wrong <= runs * 0.05


def test_a_longer_match_has_an_estimate_of_its_own() -> None:
    acceptance = Acceptance()
    for _ in range(300):
        acceptance.see("code", "lookup", 2, 0, match=3)
        acceptance.see("code", "lookup", 2, 2, match=9)
    assert acceptance.expected("code", "lookup", 2, match=3) < 0.1
    assert acceptance.expected("code", "lookup", 2, match=20) > 1.9
    acceptance.start({})
    assert acceptance.expected("code", "lookup", 2, match=20) > 1.9
    assert acceptance.chances("code", "head", 1) == [FIRST_GUESS["head", 0]]


def test_how_often_look_up_finds_something_is_followed() -> None:
    acceptance = Acceptance()
    assert acceptance.lookups("code") == ()
    for number in range(400):
        acceptance.see_lookup("code", 5, 4 if number % 2 else 0)
    (found,) = acceptance.lookups("code")
    assert found.chance == pytest.approx(0.5, abs=0.02)
    assert (found.match, found.num_tokens) == (5, 4)


def test_names_of_domains_can_not_fill_the_memory() -> None:
    acceptance = Acceptance()
    for number in range(10 * MAX_DOMAINS):
        acceptance.see(f"domain {number}", "head", 1, 0)
    assert len(acceptance._places) == MAX_DOMAINS + 1


def test_counts_and_shares_that_can_not_be_are_refused() -> None:
    for accepted in (2, -1):
        with pytest.raises(ValueError, match=f"from 0 to the 1 drafted, got {accepted}"):
            Acceptance().see("code", "head", 1, accepted)
    for shares in ([], [1.2], [float("nan")]):
        with pytest.raises(ValueError, match='domain "code": wanted shares from 0 to 1'):
            Acceptance().start({"code": shares})
