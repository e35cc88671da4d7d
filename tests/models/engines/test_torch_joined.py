"""Look-up joined to a draft in the reference engine: no output changes, and each step is drafted by what pays more."""

from pathlib import Path

import pytest
import torch

from models import catalog
from models.core.drafting.draft_families import family_named
from models.core.layers.decoder import Decoder
from models.core.throughput.cost import Cost, Time
from models.engines import Completion, LookUp
from models.engines.torch import Params, TorchEngine
from models.engines.torch.request import Joined
from models.lengths import goodput
from tests.models.drafts.answered import GREEDY, answer_all, prompts, repeated, require_equal
from tests.models.drafts.tiny import make_tiny
from tests.models.engines.sampled import P_VALUE, sampled_p_value

AUTO = GREEDY.model_copy(update={"drafting": "auto"})
LOOKUP = LookUp(num_tokens=6, shortest=1, remembered=4096)
PROMPT = [5, 6, 7, 8, 9]
K = 3
# A plain step takes 20 ms, a row more 0.3 and a pass of the draft 1.
COST = Cost.measured([*[Time(1, rows, 0, 19.7 + 0.3 * rows) for rows in (1, 4, 8)], Time(1, 4, 3, 23.9)] * 2)


@pytest.fixture(scope="module")
def plain(tiny_target: Path) -> Completion:
    return answer_all(tiny_target, None, prompts(1))[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in catalog.names("drafts") if name != "prompt_tokens"])
def test_no_output_changes_and_what_was_answered_is_looked_up(tiny_target: Path, plain: Completion, name: str) -> None:
    draft = make_tiny(family_named(name), tiny_target)
    answers = answer_all(tiny_target, draft, repeated(3), AUTO, num_draft_tokens=K, lookup=LOOKUP)
    require_equal(answers, [plain] * 3)
    found = [accepted for one in answers for match, accepted in zip(one.matches, one.accepted, strict=True) if match]
    assert sum(found) > 0
    assert len(answers[2].drafted) < 24 / 3, "an answer that came before takes a step for six tokens"


@pytest.mark.slow
def test_sampled_tokens_follow_the_target(tiny_target: Path) -> None:
    draft = make_tiny(family_named("eagle3"), tiny_target)
    assert sampled_p_value(tiny_target, draft, lookup=LOOKUP, drafting="auto") > P_VALUE


def test_a_request_for_the_drafts_own_acceptance_looks_nothing_up(tiny_target: Path) -> None:
    draft = make_tiny(family_named("eagle3"), tiny_target)
    answers = answer_all(tiny_target, draft, repeated(2), num_draft_tokens=K, lookup=LOOKUP)
    assert answers[0].drafted_ids == answers[1].drafted_ids
    assert not any(one.matches for one in answers)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"trees": {"name": "dynamic"}}, "tree dynamic"),
        ({"lengths": {"name": "confidence"}}, "length policy confidence"),
        ({"lengths": {"name": "pearl"}}, "length policy pearl"),
    ],
)
def test_what_no_policy_plans_is_refused(changes: dict[str, object], told: str) -> None:
    with pytest.raises(ValueError, match=f"joined to chains that a policy plans; {told} does otherwise"):
        Params(num_draft_tokens=K, lookup=LOOKUP, **changes)


def test_a_draft_that_is_read_beside_its_own_proposals_is_refused(tiny_target: Path) -> None:
    draft = make_tiny(family_named("prompt_tokens"), tiny_target)
    with pytest.raises(ValueError, match="PromptTokens has the target read vectors of its own"):
        answer_all(tiny_target, draft, prompts(1), AUTO, num_draft_tokens=K, lookup=LOOKUP)


def test_there_must_be_a_draft(tiny_target: Path) -> None:
    with pytest.raises(ValueError, match="look-up is joined to a draft; got none"):
        TorchEngine(
            Decoder.load(tiny_target, torch.float32), tiny_target, None, None, Params(num_draft_tokens=K, lookup=LOOKUP)
        )


def decode(joined: Joined, head: list[int], lookup: list[int], steps: int = 400) -> list[int]:
    """Drafted tokens of the draft in each step, −1 where look-up drafted; each accepts as many as it is said to."""
    turns = []
    for step in range(steps):
        turn = joined.turn("a", PROMPT * 3, PROMPT * 2, COST)
        turns.append(-1 if turn.match else turn.num_tokens)
        allowed = lookup if turn.match else head
        drafted = len(turn.token_ids) or turn.num_tokens
        joined.see(turn, drafted, min(allowed[step % len(allowed)], drafted))
    return turns


@pytest.mark.parametrize(
    ("head", "lookup", "drafts"),
    [([1, 2], [6], -1), ([3], [0, 0, 0, 1], K), ([0], [0], 0)],
    ids=["look-up", "the draft", "nothing"],
)
def test_what_has_more_accepted_drafts(head: list[int], lookup: list[int], drafts: int) -> None:
    joined = Joined(LOOKUP, (goodput, goodput.Params(explore=0.0)), K)
    assert set(decode(joined, head, lookup)[-100:]) == {drafts}


def test_after_a_swap_the_draft_is_tried_anew() -> None:
    joined = Joined(LOOKUP, (goodput, goodput.Params(explore=0.0)), K)
    assert decode(joined, [0], [0])[-1] == 0
    joined.acceptance.start({})
    assert set(decode(joined, [3], [0])[-100:]) == {K}
