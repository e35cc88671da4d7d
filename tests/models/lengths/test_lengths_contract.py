"""Every length policy stays within its limit."""

import pytest

from models import catalog

POLICIES = [catalog.load("lengths", name) for name in catalog.names("lengths")]
HISTORIES = [[], [(3, 0)] * 20, [(3, 3)] * 20, [(0, 0), (1, 1), (3, 2)]]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("steps", HISTORIES)
@pytest.mark.parametrize("limit", [1, 3, 8])
def test_the_length_is_from_zero_to_the_limit(policy: object, steps: list[tuple[int, int]], limit: int) -> None:
    assert 0 <= policy.num_draft_tokens(steps, limit, policy.Params()) <= limit  # type: ignore[attr-defined]
