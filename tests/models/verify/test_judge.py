from pathlib import Path

import pytest
import torch
from torch import Tensor

from models.core.drafting.draft_families import family_named
from models.core.drafting.proposal import Proposal
from models.core.layers.decoder import Cache, Decoder
from models.core.learning import binary_head
from models.drafts import Draft
from models.verify import Verified
from models.verify.judge import Marked, Params, expected_accepted, fit_marked, verify
from tests.models.drafts.answered import answer_all, prompts
from tests.models.drafts.tiny import make_tiny

LOGITS = torch.tensor([3.0, 2.0, 1.0, 0.0])


@pytest.fixture
def by_sign(tmp_path: Path) -> Params:
    """A head that finds a token good whose state, of width 1, is above 0."""
    head = binary_head.BinaryHead(1, 0)
    torch.nn.init.constant_(head.last.weight, 10.0)
    torch.nn.init.zeros_(head.last.bias)
    binary_head.save(head, tmp_path / "head")
    return Params(head=tmp_path / "head")


def run(tokens: list[int], parents: tuple[int, ...], states: list[float], params: Params) -> Verified:
    """Verify one tree whose target says token 0 everywhere; `states` are of its nodes."""
    laws = LOGITS.expand(1, len(tokens) + 1, 4)
    return verify(
        Proposal(torch.tensor([tokens], dtype=torch.int64), parents), laws, torch.Generator(), params, states_of(states)
    )


def states_of(states: list[float]) -> Tensor:
    return torch.tensor([0.0, *states])[None, :, None]


def test_a_token_is_kept_that_is_the_targets_or_that_the_head_finds_good(by_sign: Params) -> None:
    assert run([0, 2, 3], (-1, 0, 1), [-1, 1, -1], by_sign).tokens.tolist() == [[0, 2, 0, -1]]
    assert run([0, 2, 3], (-1, 0, 1), [-1, 1, 1], by_sign).tokens.tolist() == [[0, 2, 3, 0]]
    assert run([2, 0], (-1, 0), [-1, 1], by_sign).num_accepted.tolist() == [0]
    assert run([], (), [], by_sign).tokens.tolist() == [[0]]


def test_of_siblings_the_targets_own_is_kept_else_the_likeliest_good_one(by_sign: Params) -> None:
    assert run([3, 1, 0], (-1, -1, -1), [1, 1, -1], by_sign).path.tolist() == [[2]]
    assert run([3, 1, 2], (-1, -1, -1), [1, 1, 1], by_sign).path.tolist() == [[1]]
    assert run([3, 1, 0], (-1, -1, 0), [1, -1, -1], by_sign).path.tolist() == [[0, 2]]


def test_without_a_head_or_with_a_threshold_of_one_the_rule_is_greedy(by_sign: Params) -> None:
    for params in (Params(), Params(head=by_sign.head, threshold=1.0)):
        assert run([0, 2], (-1, 0), [9, 9], params).tokens.tolist() == [[0, 0, -1]]


@pytest.fixture(scope="module")
def draft(tiny_target: Path) -> Draft:
    return make_tiny(family_named("lm"), tiny_target)


def good(token: int) -> bool:
    return token < 131


@pytest.fixture(scope="module")
def fitted(tiny_target: Path, draft: Draft, tmp_path_factory: pytest.TempPathFactory) -> Params:
    """A head for which the first 128 tokens are good, as texts of all tokens show it."""
    decoder = Decoder.load(tiny_target, torch.float32)
    rng = torch.Generator().manual_seed(0)
    texts = []
    for _ in range(60):
        token_ids = torch.randint(3, 259, (40,), generator=rng).tolist()
        texts.append(Marked(token_ids, {place: good(token) for place, token in enumerate(token_ids)}))
    file = tmp_path_factory.mktemp("judge") / "head"
    fit_marked(decoder, texts, file, bad_weight=1.5)
    return Params(head=file)


@pytest.mark.slow
def test_a_head_keeps_more_and_what_it_keeps_beyond_the_targets_own_is_good_more_often(
    tiny_target: Path, draft: Draft, fitted: Params
) -> None:
    asked = prompts(6)
    plain = answer_all(tiny_target, draft, asked, num_draft_tokens=4)
    found = answer_all(tiny_target, draft, asked, num_draft_tokens=4, verify_greedy=fitted)
    assert sum(sum(one.accepted) for one in found) > sum(sum(one.accepted) for one in plain)
    decoder, others = Decoder.load(tiny_target, torch.float32), []
    for answer in found:
        text = [*answer.prompt_ids, *answer.token_ids]
        with torch.inference_mode():
            states, _ = decoder.forward(torch.tensor(text), Cache(decoder, len(text)))
            own = decoder.logits(states).argmax(dim=-1).tolist()
        start = len(answer.prompt_ids)
        others += [token for place, token in enumerate(text[start:], start) if token != own[place - 1]]
    drafted = [token for one in found for tokens in one.drafted_ids for token in tokens]
    assert len(others) > 10  # the output is another than the target's: that is what is lost
    assert sum(map(good, others)) / len(others) > sum(map(good, drafted)) / len(drafted) + 0.2


def test_what_does_not_fit_is_refused(tiny_target: Path, fitted: Params, tmp_path: Path) -> None:
    proposal, laws = Proposal(torch.tensor([[1]]), (-1,)), LOGITS.expand(1, 2, 4)
    with pytest.raises(ValueError, match=r"rule judge reads states \[1, 2, H\]; got None"):
        verify(proposal, laws, torch.Generator(), fitted)
    with pytest.raises(ValueError, match="features; wanted one for 1"):
        verify(proposal, laws, torch.Generator(), fitted, states_of([1.0]))
    with pytest.raises(ValueError, match="there is no file"):
        verify(proposal, laws, torch.Generator(), Params(head=tmp_path / "none"), states_of([1.0]))
    with pytest.raises(ValueError, match="the target's answers don't tell"):
        expected_accepted(torch.zeros(1, 1).long(), torch.ones(1, 1, 1), torch.ones(1, 1, 1), fitted)
    decoder = Decoder.load(tiny_target, torch.float32)
    with pytest.raises(ValueError, match="got 2 marks of one kind"):
        fit_marked(decoder, [Marked([5, 6], {0: True, 1: True})], tmp_path / "head")
    with pytest.raises(ValueError, match=r"marked places must be from 0 to 1, got \[2\]"):
        fit_marked(decoder, [Marked([5, 6], {2: True})], tmp_path / "head")
