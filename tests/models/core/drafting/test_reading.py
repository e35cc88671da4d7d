from pathlib import Path

import pytest
import torch
from torch import Tensor

from models.core.drafting.draft_families import family_named
from models.core.drafting.drafters import Nested
from models.core.drafting.reading import NestedReader, Reader
from models.core.layers.decoder import Decoder
from models.drafts import Rows, confidence, lm
from models.engines.torch import Params
from models.targets import describe, random
from tests.conftest import shake
from tests.models.drafts.answered import answer_all, prompts, require_equal
from tests.models.drafts.tiny import make_tiny
from tests.models.engines.sampled import P_VALUE, sampled_p_value

ENDS = (1, 2, 4)  # two drafts of one and two layers, and the whole of four


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    random.build(random.Params(num_layers=5), directory := tmp_path_factory.mktemp("target"))
    return directory


@pytest.fixture(scope="module")
def draft(target: Path) -> lm.Lm:
    made = lm.create(lm.Params(num_layers=4, nested=(1, 2)), target, None)
    shake(made, 0.05, 0)
    return made


def each_says(draft: lm.Lm, text: list[int]) -> list[Tensor]:
    """Return the logits [V] that each nested draft, then the whole one, gives behind a text, in one pass over it."""
    rows = Rows(torch.zeros(1, 0, 0), torch.tensor([text]), torch.tensor([0]), torch.tensor([len(text) - 2]))
    with torch.inference_mode():
        whole, *nested = [unrolls[0].logits[0] for unrolls in draft.unroll_all(rows, 1)]
    return [*nested, whole]


def middle_confidence(draft: lm.Lm, texts: list[list[int]]) -> float:
    """Return a confidence that the smaller drafts reach half of the time."""
    found = sorted(confidence(logits) for text in texts for logits in each_says(draft, text)[:-1])
    return found[len(found) // 2]


def test_a_token_is_said_by_the_first_that_is_sure_as_if_all_layers_had_seen_all_before(draft: lm.Lm) -> None:
    """Proposals of some tokens, of which a part turns out to be right: each token's logits are those of one pass."""
    rng = torch.Generator().manual_seed(0)
    text = torch.randint(3, 67, (12,), generator=rng).tolist()
    sure = middle_confidence(draft, [text[:end] for end in range(2, 13)])
    drafter = draft.drafter(80)
    assert isinstance(drafter, NestedReader)
    assert isinstance(drafter, Nested)
    drafter.take_from(sure)
    drafter.extend(torch.tensor(text), torch.zeros(11, 0))
    exits = []
    with torch.inference_mode():
        for right in (0, 3, 1, 2, 0, 4, 1):
            seen: list[Tensor] = []

            def draw(logits: Tensor, seen: list[Tensor] = seen) -> tuple[int, None]:
                seen.append(logits)
                return 3 + int(logits[3:67].argmax()), None

            tokens = drafter.propose(4, draw).token_ids[0].tolist()
            for number, logits in enumerate(seen):
                says = each_says(draft, text + tokens[:number])
                first = next(place for place, one in enumerate(says) if place == 2 or confidence(one) >= sure)
                exits.append(ENDS[first])
                torch.testing.assert_close(logits, says[first], rtol=1e-4, atol=1e-4)
            came = [*tokens[:right], 3 + (tokens[right] - 2) % 64 if right < 4 else 5]
            drafter.extend(torch.tensor([text[-1], *came]), torch.zeros(len(came), 0))
            text += came
    assert set(exits) == set(ENDS)


@pytest.mark.slow
@pytest.mark.parametrize(("sure", "end"), [(0.0, 1), (None, 4), (1.0, 4)])
def test_at_the_limits_one_draft_says_all(draft: lm.Lm, target: Path, sure: float | None, end: int) -> None:
    alone = lm.cut(draft, 1) if end == 1 else draft
    asked, engine = prompts(2), {} if sure is None else {"nested_confidence": sure}
    found = answer_all(target, draft, asked, num_draft_tokens=3, **engine)
    wanted = answer_all(target, alone, asked, num_draft_tokens=3)
    assert [one.drafted_ids for one in found] == [one.drafted_ids for one in wanted]


@pytest.mark.slow
@pytest.mark.parametrize("lengths", ["fixed", "confidence"])
def test_output_stays_that_of_the_target(draft: lm.Lm, target: Path, lengths: str) -> None:
    asked = prompts(4)
    ways = {"nested_confidence": middle_confidence(draft, asked), "lengths": {"name": lengths}}
    found = answer_all(target, draft, asked, num_draft_tokens=3, **ways)
    require_equal(found, answer_all(target, None, asked))


def test_a_tree_after_proposals_of_small_drafts_is_grown_by_the_whole_draft(draft: lm.Lm) -> None:
    text = prompts(1)[0]
    drafter, fresh = draft.drafter(60), draft.drafter(60)
    assert isinstance(drafter, NestedReader) and isinstance(fresh, NestedReader)
    with torch.inference_mode():
        for one in (drafter, fresh):
            one.extend(torch.tensor(text), torch.zeros(len(text) - 1, 0))
        drafter.take_from(0.0)
        drafter.propose(3, lambda logits: (int(logits.argmax()), None))
        grown, wanted = (one.expand([7, 9, 8], [-1, -1, 0], [-1, 1, 2]) for one in (drafter, fresh))
        torch.testing.assert_close(grown, wanted, rtol=1e-4, atol=1e-4)
        drafter.extend(torch.tensor([text[-1], 11]), torch.zeros(1, 0))
        seen: list[Tensor] = []
        drafter.propose(1, lambda logits: (seen.append(logits) or int(logits.argmax()), None))
    torch.testing.assert_close(seen[0], each_says(draft, [*text, 11])[0], rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_sampled_tokens_follow_the_target(draft: lm.Lm, target: Path) -> None:
    sure = middle_confidence(draft, prompts(4))
    assert sampled_p_value(target, draft, nested_confidence=sure) > P_VALUE


def test_what_has_nothing_to_choose_between_is_refused(draft: lm.Lm, target: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Ngram has no other drafts nested in it"):
        answer_all(target, make_tiny(family_named("ngram"), target), prompts(1), nested_confidence=0.5)
    for part, name in (("trees", "dynamic"), ("lengths", "pearl")):
        with pytest.raises(ValueError, match=f"{name} always asks the whole draft"):
            Params(nested_confidence=0.5, **{part: {"name": name}})
    served, other = tmp_path / "served", tmp_path / "other"
    for directory, nested in ((served, (1, 2)), (other, (2,))):
        directory.mkdir()
        lm.save(lm.create(lm.Params(num_layers=4, nested=nested), target, None), directory)
    lm.check(served, served, describe(target))
    with pytest.raises(ValueError, match=r"nested at \[2\], the served draft at \[1, 2\]; a swap can't change that"):
        lm.check(other, served, describe(target))


class Counting(Decoder):
    """Notes how many tokens each pass reads."""

    def forward(self, token_ids: Tensor, *rest: object, **more: object) -> tuple[Tensor, Tensor]:
        self.read.append(len(token_ids))
        return super().forward(token_ids, *rest, **more)


class Whole(Reader):
    """Drafts with the whole target."""

    def decoder(self) -> Decoder:
        return self.draft


@torch.inference_mode()
def test_only_what_was_not_read_yet_is_read(tiny_target: Path) -> None:
    target = Counting.load(tiny_target, torch.float32)
    target.read = []
    drafter = Whole(target, 20)
    drafter.extend(torch.tensor([3, 4, 5, 6]), torch.empty(3, 0))
    proposed = drafter.propose(3, lambda logits: (int(logits.argmax()), None)).token_ids[0].tolist()
    assert target.read == [4, 1, 1]
    drafter.extend(torch.tensor([6, *proposed, 9]), torch.empty(4, 0))  # all were right
    drafter.propose(1, lambda logits: (7, None))
    assert target.read[3:] == [2]  # the last drafted one was not read, nor the one after it
    drafter.extend(torch.tensor([9, 8]), torch.empty(1, 0))  # 7 was wrong, and never read
    drafter.expand([10, 11], [-1, -1], [-1, 0])
    assert target.read[4:] == [2]
