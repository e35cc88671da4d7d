"""Every draft family and tree in the reference engine, also with look-up: the output is that without a draft."""

import asyncio
from itertools import product
from pathlib import Path

import pytest
import torch

from models import catalog
from models.core.drafting.draft_families import family_named, is_trained
from models.core.drafting.proposal import Proposal
from models.core.throughput.cost import Cost, Time
from models.drafts import Draft
from models.engines import Completion, LookUp, Sampling
from models.engines.torch import Params, TorchEngine
from models.engines.torch.request import Joined
from models.lengths import goodput
from tests.models.drafts.answered import GREEDY, answer_all, prompts, repeated, require_equal
from tests.models.drafts.tiny import make_tiny, save_tiny
from tests.models.engines.sampled import P_VALUE, sampled_p_value
from tests.models.pairs.forms import chosen

FAMILIES = catalog.names("drafts")
EXPANDING = [
    *("chimera", "clover", "dflash", "dream", "eagle", "eagle3", "early_exit", "falcon", "hydra", "lm", "medusa"),
    *("parallel_eagle", "prompt_tokens", "rag_draft", "self_skip"),
]
# New ones say what chance has it; trained ones are accepted in tests/models/drafts/test_learning.py.
BY_CHANCE = ["chimera", "dream", "falcon"]
TREES = [name for name in catalog.names("trees") if catalog.load("trees", name).BRANCHES]
SAMPLED = sorted({*EXPANDING, "jacobi", "kangaroo", "token_recycling"} - {"eagle3", "lm"})
GROWN = chosen(list(product(TREES, EXPANDING)), lambda _: False)
NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU here")
ASKED = prompts(2) + prompts(1)  # one comes again, which some families learn from


def make(name: str, target: Path, texts: list[Completion] | None = None) -> Draft:
    family = family_named(name)
    draft = make_tiny(family, target)
    if texts and hasattr(family, "collect"):
        family.collect(draft, [[*one.prompt_ids, *one.token_ids] for one in texts])
    return draft


@pytest.fixture(scope="module")
def plain(tiny_target: Path) -> list[Completion]:
    return answer_all(tiny_target, None, ASKED)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=NO_GPU)])
def test_greedy_output_is_that_without_a_draft(
    tiny_target: Path, plain: list[Completion], name: str, device: str
) -> None:
    for num, asked in ((1, ASKED[2:]), (6, ASKED)):
        draft = make(name, tiny_target, plain[:1])
        answers = answer_all(tiny_target, draft, asked, device=device, num_draft_tokens=num)
        require_equal(answers, plain[-len(asked) :])
        assert 0 < max(max(one.drafted) for one in answers) <= num


def start(target: Path, directory: Path, dtype: str) -> TorchEngine:
    return asyncio.run(TorchEngine.start(target, directory, Params(dtype=dtype, num_draft_tokens=3)))


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_a_draft_of_a_directory_drafts_in_either_format_and_keeps_its_weights(
    tiny_target: Path, plain: list[Completion], tmp_path: Path, name: str
) -> None:
    family = family_named(name)
    directory = save_tiny(family, tiny_target, tmp_path)
    for dtype, asked in (("bfloat16", ASKED[:1]), ("float32", ASKED)):
        engine = start(tiny_target, directory, dtype)
        answers = [asyncio.run(engine.generate(prompt, GREEDY, "0")) for prompt in asked]
        assert sum(sum(one.drafted) for one in answers) > 0 or not is_trained(family)
        assert asyncio.run(engine.check_draft(directory)) == 0.0
    require_equal(answers, plain)


def test_a_draft_multiplies_in_the_engines_format(tiny_target: Path, tmp_path: Path) -> None:
    for name in ("eagle3", "lm"):
        (tmp_path / name).mkdir()
    head = save_tiny(family_named("eagle3"), tiny_target, tmp_path / "eagle3")
    model = save_tiny(family_named("lm"), tiny_target, tmp_path / "lm")
    said = {}
    for dtype in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        draft = start(tiny_target, head, name).loaded
        said[dtype] = draft.say(torch.linspace(-1, 1, draft.config["hidden_size"])[None])[1]
        assert start(tiny_target, model, name).loaded.decoder().dtype == dtype
    torch.testing.assert_close(said[torch.bfloat16], said[torch.float32], rtol=0.02, atol=0.02)
    assert not torch.equal(said[torch.bfloat16], said[torch.float32])


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=NO_GPU)])
@pytest.mark.parametrize(("name", "family"), GROWN)
def test_greedy_output_with_a_grown_tree_is_that_without_a_draft(
    tiny_target: Path, plain: list[Completion], name: str, family: str, device: str
) -> None:
    draft, trees = make(family, tiny_target), {"name": name}
    answers = answer_all(tiny_target, draft, ASKED, device=device, num_draft_tokens=7, trees=trees)
    require_equal(answers, plain)
    assert {drafted for one in answers for drafted in one.drafted} <= set(range(8))
    assert sum(sum(one.accepted) for one in answers) > 0 or family in BY_CHANCE


@pytest.mark.parametrize("name", SAMPLED)
@pytest.mark.slow
def test_sampled_tokens_follow_the_target(tiny_target: Path, name: str) -> None:
    assert sampled_p_value(tiny_target, make(name, tiny_target)) > P_VALUE


@pytest.mark.slow
def test_sampled_tokens_follow_the_target_where_look_up_is_joined_to_a_draft(tiny_target: Path) -> None:
    assert sampled_p_value(tiny_target, make("eagle3", tiny_target), lookup=LOOKUP, drafting="auto") > P_VALUE


@pytest.mark.slow
@pytest.mark.parametrize(("name", "room"), [*((name, 3) for name in FAMILIES), ("eagle3", 1), ("suffix", 1)])
def test_a_prompt_that_nearly_fills_the_context_gets_the_tokens_that_fit(
    tiny_target: Path, name: str, room: int
) -> None:
    prompt = (prompts(1)[0] * 4)[: 32 - room]
    (answer,) = answer_all(tiny_target, make(name, tiny_target), [prompt], num_draft_tokens=5, max_model_len=32)
    (alone,) = answer_all(tiny_target, None, [prompt], max_model_len=32)
    assert answer.token_ids == alone.token_ids
    assert (len(answer.token_ids), answer.finish_reason) == (room, "length")


@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in EXPANDING])
def test_a_tree_for_a_family_that_can_not_expand_is_refused(tiny_target: Path, family: str) -> None:
    with pytest.raises(ValueError, match="can't go on from any node of a tree"):
        answer_all(tiny_target, make(family, tiny_target), prompts(1), trees={"name": "dynamic"})


@pytest.mark.parametrize("family", ["eagle3", "parallel_eagle", "dflash"])
def test_a_head_that_reads_layers_that_the_target_lacks_is_refused(tiny_target: Path, family: str) -> None:
    draft = make(family, tiny_target)
    draft.config["eagle_aux_hidden_state_layer_ids"] = [0, 1, 9]
    with pytest.raises(ValueError, match="reads what layer 9 of the target puts out, which has 2 layers"):
        answer_all(tiny_target, draft, prompts(1))


def test_a_tree_larger_than_the_cache_is_an_error_that_says_so(
    tiny_target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft = make("ngram", tiny_target)
    monkeypatch.setattr(type(draft.drafter(9)), "propose", lambda *_: Proposal.chain([5] * 40))
    with pytest.raises(ValueError, match="9 tokens and 41 more; the cache holds 19"):
        answer_all(tiny_target, draft, [prompts(2)[1]], Sampling(max_tokens=6), num_draft_tokens=3)


AUTO = GREEDY.model_copy(update={"drafting": "auto"})
LOOKUP = LookUp(num_tokens=6, shortest=1, remembered=4096)
PROMPT = [5, 6, 7, 8, 9]
K = 3
# A plain step takes 20 ms, a row more 0.3 and a pass of the draft 1.
COST = Cost.measured([*[Time(1, rows, 0, 19.7 + 0.3 * rows) for rows in (1, 4, 8)], Time(1, 4, 3, 23.9)] * 2)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "prompt_tokens"])
def test_no_output_changes_and_what_was_answered_is_looked_up(
    tiny_target: Path, plain: list[Completion], name: str
) -> None:
    answers = answer_all(tiny_target, make(name, tiny_target), repeated(3), AUTO, num_draft_tokens=K, lookup=LOOKUP)
    require_equal(answers, plain[:1] * 3)
    found = [accepted for one in answers for match, accepted in zip(one.matches, one.accepted, strict=True) if match]
    assert sum(found) > 0
    assert len(answers[2].drafted) < 24 / 3, "an answer that came before takes a step for six tokens"


def test_a_request_for_the_drafts_own_acceptance_looks_nothing_up(tiny_target: Path) -> None:
    draft = make("eagle3", tiny_target)
    answers = answer_all(tiny_target, draft, repeated(2), num_draft_tokens=K, lookup=LOOKUP)
    assert answers[0].drafted_ids == answers[1].drafted_ids
    assert not any(one.matches for one in answers)


@pytest.mark.parametrize(("key", "name"), [("trees", "dynamic"), ("lengths", "confidence"), ("lengths", "pearl")])
def test_what_no_policy_plans_is_refused(key: str, name: str) -> None:
    with pytest.raises(ValueError, match=f"joined to chains that a policy plans; .* {name} does otherwise"):
        Params(num_draft_tokens=K, lookup=LOOKUP, **{key: {"name": name}})


def test_there_must_be_a_draft(tiny_target: Path) -> None:
    with pytest.raises(ValueError, match="look-up is joined to a draft; got none"):
        answer_all(tiny_target, None, prompts(1), AUTO, num_draft_tokens=K, lookup=LOOKUP)


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
