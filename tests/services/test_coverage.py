"""How much of what is served the draft's vocabulary can say."""

import pytest
import torch
from safetensors.torch import save_file

from infra.consent import OTHER_DOMAINS
from models.core.drafting.draft_files import read_vocabulary
from services.recorder import MAX_DOMAINS, ROLLING, VocabularyCoverage


def test_the_first_token_does_not_count_since_it_is_never_drafted() -> None:
    coverage = VocabularyCoverage()
    coverage.follow("3", frozenset({1, 2}))
    coverage.add("3", "code", [9, 1, 2, 8, 8])
    coverage.add("3", "code", [9])
    coverage.add("3", "chat", [9, 1])
    assert coverage.shares() == {"chat": 1.0, "code": 0.5}


def test_answers_of_another_draft_and_of_none_count_for_nobody() -> None:
    coverage = VocabularyCoverage()
    coverage.add("", "code", [1, 1])
    coverage.follow("3", frozenset({1}))
    coverage.add("2", "code", [1, 1])
    assert coverage.shares() == {}
    coverage.add("3", "code", [1, 1])
    coverage.follow("4", None)  # which can say every token
    coverage.add("4", "code", [1, 1])
    assert coverage.shares() == {}


def test_a_share_is_over_the_last_answers_and_domains_are_bounded() -> None:
    coverage = VocabularyCoverage()
    coverage.follow("3", frozenset({1}))
    for token in [2] * ROLLING + [1] * ROLLING:
        coverage.add("3", "code", [0, token])
    for number in range(2 * MAX_DOMAINS):
        coverage.add("3", f"made up {number}", [0, 1])
    shares = coverage.shares()
    assert shares["code"] == 1.0
    assert len(shares) == MAX_DOMAINS + 1 and OTHER_DOMAINS in shares


@pytest.mark.parametrize(
    ("tensors", "found"),
    [
        ({"d2t": torch.tensor([1, 1, 4])}, {1, 2, 6}),
        ({"token_map": torch.tensor([3, 5])}, {3, 5}),
        ({"fc.weight": torch.zeros(1)}, None),
    ],
)
def test_a_drafts_vocabulary_is_read_off_its_files(tmp_path, tensors, found) -> None:  # type: ignore[no-untyped-def]
    save_file(tensors, tmp_path / "model.safetensors")
    assert read_vocabulary(tmp_path) == found
