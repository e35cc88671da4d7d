"""Putting the planned proposer in place of vLLM's own: another layout is refused in one line and left as it was."""

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.spec_decode.eagle import EagleProposer

from models.core.drafting.lookup import NgramIndex
from models.engines.vllm.patches.proposer import DRAFTER_READS, READS, Planned


def runner(drafter: Any, **attributes: Any) -> Any:
    return SimpleNamespace(drafter=drafter, **attributes)


def bare() -> Any:
    """Return a proposer of vLLM that was not set up, so that it has its class's attributes alone."""
    return object.__new__(EagleProposer)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (runner(object()), r"vLLM drafts by object; another release is installed than wanted"),
        (runner(bare()), r"SimpleNamespace has no input_batch; another release"),
        (runner(bare(), **dict.fromkeys(READS)), r"EagleProposer has no _last_draft_probs; another release"),
    ],
)
def test_a_vllm_of_another_layout_is_refused_in_one_line_and_left_as_it_was(given: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told) as refused:
        Planned(given, NgramIndex(shortest=3, longest=16, capacity=0))
    assert "\n" not in str(refused.value)
    assert "propose" not in getattr(given.drafter, "__dict__", {})
    assert given.__dict__.get("propose_draft_token_ids") is None


def test_where_all_is_there_the_proposer_is_planned_and_still_vllms() -> None:
    given = runner(bare(), **dict.fromkeys(READS))
    given.speculative_config = SimpleNamespace(disable_padded_drafter_batch=False)
    given.drafter.__dict__ |= dict.fromkeys(DRAFTER_READS[2:])
    planned = Planned(given, NgramIndex(shortest=3, longest=16, capacity=0))
    assert type(given.drafter) is EagleProposer
    assert given.drafter.propose == planned.propose
    assert given.propose_draft_token_ids == planned.propose_unless_it_rests
    assert given.speculative_config.disable_padded_drafter_batch
