import math
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from models.core.drafting.draft_families import open_draft
from models.drafts import rag_draft
from models.targets import describe
from tests.models import planted
from tests.models.drafts.answered import answer_all, prompts, require_equal
from tests.models.drafts.tiny import TINY, make_tiny, save_tiny

PROMPT = [1, 2, 3, 4, 5, 6, 7, 5, 9, 10, 11, 9, 5]


def made(target: Path, **sizes: int) -> rag_draft.RagDraft:
    return rag_draft.create(rag_draft.Params(**TINY["rag_draft"] | sizes), target, None)


def test_the_first_part_the_question_and_what_it_asks_for_are_read_in_their_order(tiny_target: Path) -> None:
    # Parts: 1 2 | 3 4 | 5 6 | 7 5 | 9 10 | 11, question: 9 5. Token 9 is in one of them, token 5 in two.
    assert made(tiny_target, context=6).choose(PROMPT) == [1, 2, 9, 10, 9, 5]
    assert made(tiny_target, context=8).choose(PROMPT) == [1, 2, 7, 5, 9, 10, 9, 5]  # of equal ones the later
    assert made(tiny_target, context=10).choose(PROMPT) == [1, 2, 5, 6, 7, 5, 9, 10, 9, 5]
    # There is room for more, but nothing that has to do with the question.
    assert made(tiny_target, context=12).choose(PROMPT) == [1, 2, 5, 6, 7, 5, 9, 10, 9, 5]


def test_a_prompt_without_anything_of_the_question_leaves_its_two_ends(tiny_target: Path) -> None:
    assert made(tiny_target).choose([1, 2, 3, 4, 5, 6, 7, 8]) == [1, 2, 7, 8]


@torch.inference_mode()
def test_the_draft_says_what_the_target_says_after_the_shorter_text(tiny_target: Path) -> None:
    draft, seen = made(tiny_target), []

    def draw(logits: torch.Tensor) -> tuple[int, None]:
        seen.append(logits)
        return 40 + len(seen), None

    drafter = draft.drafter(40)
    drafter.extend(torch.tensor([*PROMPT, 30]), torch.empty(len(PROMPT), 0))
    drafter.propose(2, draw)
    drafter.extend(torch.tensor([30, 41, 50]), torch.empty(2, 0))
    drafter.propose(1, draw)
    read = [*draft.choose(PROMPT), 30, 41]
    model = AutoModelForCausalLM.from_pretrained(tiny_target, dtype=torch.float32)
    wanted = model(torch.tensor([[*read, 50]])).logits[0]
    for logits, place in zip(seen, (len(read) - 2, len(read) - 1, len(read)), strict=True):
        torch.testing.assert_close(logits, wanted[place], rtol=1e-3, atol=1e-3)


def test_where_the_text_before_hardly_matters_nearly_all_is_accepted(tmp_path: Path) -> None:
    planted.build(tmp_path)
    answers = answer_all(tmp_path, made(tmp_path), prompts(3), num_draft_tokens=4)
    require_equal(answers, answer_all(tmp_path, None, prompts(3)))
    assert sum(sum(one.accepted) for one in answers) > 0.8 * sum(sum(one.drafted) for one in answers)


@pytest.mark.slow
def test_nothing_is_drafted_for_a_prompt_that_fits_into_the_context(tiny_target: Path) -> None:
    asked = prompts(1)
    for context, drafted in ((len(asked[0]), {0}), (len(asked[0]) - 1, {3})):
        for more in ({}, {"trees": {"name": "dynamic"}}):
            (answer,) = answer_all(tiny_target, made(tiny_target, context=context), asked, num_draft_tokens=3, **more)
            require_equal([answer], answer_all(tiny_target, None, asked))
            assert set(answer.drafted) == drafted


def test_what_it_reads_survives_the_disk_and_can_be_swapped_for_no_other(tiny_target: Path, tmp_path: Path) -> None:
    saved, other = save_tiny(rag_draft, tiny_target, tmp_path / "saved"), tmp_path
    assert open_draft(saved, tiny_target).params == make_tiny(rag_draft, tiny_target).params
    rag_draft.save(made(tiny_target, context=9), other)
    with pytest.raises(ValueError, match="differs from the served draft in rag_draft; a swap can't change it"):
        rag_draft.check(other, saved, describe(tiny_target))


@pytest.mark.parametrize("wrong", [{"context": 5}, {"part": 0}, {"question": 0}])
def test_a_context_without_room_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"wanted a context of the question and two parts, 6; got 5|greater than or"):
        rag_draft.Params(**TINY["rag_draft"] | wrong)


def test_a_score_by_hand() -> None:
    # Token 7 stands in one of three parts, twice; token 8 in two. Parts are 2, 2 and 5 long, 3 on average.
    parts = [[1, 8], [2, 3], [7, 7, 8, 4, 5]]
    rare, common = math.log(1 + 2.5 / 1.5), math.log(1 + 1.5 / 2.5)
    short, long = 1.2 * (0.25 + 0.75 * 2 / 3), 1.2 * (0.25 + 0.75 * 5 / 3)
    wanted = [common * 2.2 / (1 + short), 0.0, rare * 2 * 2.2 / (2 + long) + common * 2.2 / (1 + long)]
    assert rag_draft.score(parts, [8, 7, 8]) == pytest.approx(wanted)
    assert (
        min(rag_draft.score([[1, 2], [1, 3], [1, 4]], [1])) > 0
    )  # what every part holds says little, never the contrary


@pytest.mark.parametrize(("parts", "question", "wanted"), [([], [1], []), ([[1, 2]], [], [0.0]), ([[]], [1], [0.0])])
def test_nothing_to_score_or_to_ask_is_no_error(parts, question, wanted) -> None:
    assert rag_draft.score(parts, question) == wanted
