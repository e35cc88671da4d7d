"""Figures of a way to draft, by hand, and on the two-layer target against plain decoding."""

import math
from pathlib import Path

import pytest

from models.engines import Completion
from models.engines.torch.request import Took
from models.trees import static
from tasks.measure import decoding, lesson
from tasks.measure.comparisons import lengths, trees
from tasks.measure.decoding import Answer, figures
from tests.tasks.measure.benches import bench_of

SHAPE = static.shape(12, static.Params())
# Trees that are fixed and that grow, policies without a head, with one, and over the size of a tree; with the rows and
# passes of a step where they are always the same.
TRIED = {
    "static, 12 tokens": (1 + len(SHAPE.parents), len(SHAPE.levels)),
    "dynamic, 12 tokens": None,
    "fixed, at most 3": (4, 3),
    "specdec_pp, at most 8": None,
    "hardware_aware, at most 8": None,
}
ROWS = {row.name: row for row in (*trees.rows(1.0), *lengths.rows(1.0))}


def answer(tokens: tuple[int, ...], accepted: tuple[int, ...], steps: list[Took], per_token_ms: float) -> Answer:
    completion = Completion(
        request_id="prompt",
        prompt_ids=(1, 2),
        token_ids=tokens,
        drafted=tuple(step.num_rows - 1 for step in steps),
        accepted=accepted,
        drafted_ids=(),
        finish_reason="length",
        first_token_ms=1.0,
        per_token_ms=per_token_ms,
        draft_version="",
        speculating=True,
        gaps=(1.0, 1.0, 1e-4, 1.0, 1.0),
    )
    return Answer(completion, steps)


PLAIN = answer((1, 2, 3, 4, 5), (0,) * 4, [Took(1, 0, 0.0, 0.01)] * 4, 12.0)
STEPS = [Took(4, 3, 0.002, 0.011), Took(2, 1, 0.004, 0.013)]


def test_figures_are_worked_by_hand() -> None:
    found = figures([(PLAIN, answer((1, 2, 3, 4, 5), (2, 0), STEPS, 6.0))])
    wanted = {"tau": 2, "rows": 3, "passes": 2, "draft_ms": 3, "target_ms": 12, "speedup": 2}
    assert found == pytest.approx({**wanted, "equal_pct": 100, "near_tie_pct": 0})
    assert found.keys() == decoding.COLUMNS.keys()


def test_an_answer_of_more_steps_weighs_more() -> None:
    short = answer((1, 2, 3, 4, 5), (3,), [Took(4, 3, 0.002, 0.010)], 1.0)
    long = answer((1, 2, 3, 4, 5), (0,) * 3, [Took(4, 3, 0.002, 0.010)] * 3, 3.0)
    found = figures([(PLAIN, short), (PLAIN, long)])
    assert float(found["tau"]) == pytest.approx(1 + 3 / 4)
    assert float(found["speedup"]) == pytest.approx((12 + 12) / (1 + 3))


def test_a_near_tie_is_told_apart_and_another_output_has_no_speed() -> None:
    tied = answer((1, 2, 9, 4, 5), (2, 0), STEPS, 6.0)
    found = figures([(PLAIN, tied), (PLAIN, PLAIN)])
    assert (found["equal_pct"], found["near_tie_pct"]) == (50, 50)
    assert float(found["speedup"]) > 1
    wrong = figures([(PLAIN, answer((1, 9, 3, 4, 5), (2, 0), STEPS, 6.0)), (PLAIN, PLAIN)])
    assert (wrong["equal_pct"], wrong["near_tie_pct"]) == (50, 0)
    assert math.isnan(wrong["speedup"])


@pytest.mark.slow
def test_the_champion_drafts_where_it_can_grow_trees_and_a_taught_head_where_there_is_none(
    tiny_target: Path, tiny_draft: Path, tmp_path: Path
) -> None:
    champion, directory = decoding._draft(bench_of(tiny_target, tmp_path, tiny_draft), seed=0)
    assert directory == tiny_draft
    assert len(champion.vocabulary) == 64
    taught = [decoding._draft(bench_of(tiny_target, tmp_path), seed=0)[0] for _ in range(2)]
    assert taught[0] is taught[1]
    assert len(taught[0].vocabulary) == 259
    assert taught[0] is not decoding._draft(bench_of(tiny_target, tmp_path), seed=1)[0]


def test_the_prompts_are_those_of_the_seed(tiny_target: Path, tmp_path: Path) -> None:
    texts = bench_of(tiny_target, tmp_path).held_out
    first, again, other = (lesson.opening(texts, 3, seed) for seed in (0, 0, 1))
    assert first == again != other
    assert {len(prompt) for prompt in first} == {lesson.PROMPT_LENGTH}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "exactly"), TRIED.items(), ids=TRIED)
def test_a_row_keeps_to_its_budget_and_to_the_targets_output(
    name: str, exactly: tuple[int, int] | None, tiny_target: Path, tiny_draft: Path, tmp_path: Path
) -> None:
    found = decoding.measure(bench_of(tiny_target, tmp_path, tiny_draft), ROWS[name], seed=0)
    assert found.keys() == decoding.COLUMNS.keys()
    assert found["equal_pct"] + found["near_tie_pct"] == 100
    assert found["speedup"] > 0 and found["draft_ms"] > 0 and found["target_ms"] > 0
    limit = ROWS[name].settings["engine"]["num_draft_tokens"]
    assert 1 <= found["tau"] <= 1 + found["passes"] and 1 <= found["rows"] <= 1 + limit
    assert exactly in (None, (found["rows"], found["passes"]))
