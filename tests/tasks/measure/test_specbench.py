"""Spec-Bench on the two-layer target: all are asked the same, outputs are held to plain decoding, speeds are paired."""

import json
from pathlib import Path

import pytest

from models.core.evaluation.golden import save_golden
from models.sources import Message
from tasks.measure.configurations import SERVED, Configuration, read_configurations
from tasks.measure.run import Bar
from tasks.measure.specbench import (
    ALL,
    PLAIN,
    Question,
    Row,
    _answer,
    chat_before,
    fingerprint,
    make_report,
    read_questions,
)
from tests.tasks.measure.benches import open_target

QUESTIONS = [
    Question(id="1", domain="mt", messages=tuple(Message(role="user", content=text) for text in ("a b c", "again"))),
    Question(id="2", domain="qa", messages=(Message(role="user", content="a b c"),)),
    Question(id="3", domain="qa", messages=(Message(role="user", content="x" * 400),)),
]


@pytest.fixture(scope="module")
def measured(tiny_target: Path, tiny_draft: Path, bar: Bar) -> list[Row]:
    target = open_target(tiny_target, tiny_draft, max_model_len=160)
    return _answer(target, read_configurations(None, 3), QUESTIONS, 12, bar)


@pytest.fixture
def judged_by(tmp_path: Path) -> Path:
    """A target's folder with the threshold that outputs are judged at."""
    save_golden(tmp_path, [], 1e-3)
    return tmp_path


def test_every_turn_is_answered_in_every_way_from_the_same_chat(measured: list[Row]) -> None:
    sides = [PLAIN, *read_configurations(None, 3)]
    asked = [row["prompt_id"] for row in measured if row["fits"]]
    assert asked == [name for name in ("1-0", "1-1", "2-0") for _ in sides]
    assert [row["side"] for row in measured[: len(sides)]] == sides
    assert [row["prompt_id"] for row in measured if not row["fits"]] == ["3-0"]
    assert all(row["seconds"] > 0 for row in measured if row["fits"])


@pytest.mark.slow
def test_the_report_tells_each_task_and_all_of_them(measured: list[Row], judged_by: Path, tmp_path: Path) -> None:
    report = make_report({0: measured}, read_configurations(None, 3), judged_by, tmp_path, seed=0)
    figures = report.figures["temperatures"]["0"]["tasks"]
    assert list(figures) == ["mt", "qa", ALL]
    assert figures[ALL]["suffix"]["num_prompts"] == 3
    assert figures["qa"]["suffix"]["num_prompts"] == 1
    assert figures[ALL][PLAIN]["speedup"]["overall"]["value"] == 1.0
    assert figures[ALL][PLAIN]["tau"]["value"] == 1.0
    assert report.failures == []
    assert "1 turns did not fit the context" in report.notes[-1]
    assert report.picture is not None and report.picture.is_file()


def ways(*names: str, **engine: object) -> dict[str, Configuration]:
    return {name: Configuration(draft=SERVED, engine=engine) for name in names}


def rows(side: str, seconds: float, token_ids: list[int], accepted: tuple[int, ...]) -> list[Row]:
    about = {"side": side, "domain": "qa", "fits": True, "gaps": [5.0] * len(token_ids), "token_ids": token_ids}
    steps = {"drafted_per_step": [2] * len(accepted), "accepted_per_step": accepted, "seconds": seconds}
    steps["decode_s"] = seconds - 0.25
    return [{"prompt_id": f"{number}-0", **about, **steps} for number in range(3)]


def test_figures_are_worked_by_hand(judged_by: Path, tmp_path: Path) -> None:
    told = [
        *({**row, "drafted_per_step": [0] * 4} for row in rows(PLAIN, 2.0, [1, 2, 3, 4, 5], (0, 0, 0, 0))),
        *rows("fast", 0.5, [1, 2, 3, 4, 5], (2, 0)),
        *rows("slow", 4.0, [1, 2, 3, 4, 5], (0, 2)),
    ]
    report = make_report({0: told}, ways("fast", "slow"), judged_by, tmp_path, seed=0)
    found = report.figures["temperatures"]["0"]["tasks"][ALL]
    assert found["fast"]["speedup"]["overall"]["value"] == 4.0
    assert found["slow"]["speedup"]["overall"]["value"] == 0.5
    assert found["fast"]["decoding_speedup"]["overall"]["value"] == 7.0
    assert found["fast"]["tau"]["value"] == 2.0
    assert found["fast"]["acceptance_by_place"] == [0.5, 0.5]


def test_another_output_fails_the_benchmark_and_has_no_speed(judged_by: Path, tmp_path: Path) -> None:
    told = [*rows(PLAIN, 2.0, [1, 2, 3], (0, 0)), *rows("wrong", 0.1, [1, 9, 3], (2,))]
    report = make_report({0: told}, ways("wrong"), judged_by, tmp_path, seed=0)
    assert report.failures == ["wrong: 3 of 3 outputs differ from plain decoding"]
    assert report.figures["temperatures"]["0"]["tasks"][ALL]["wrong"]["speedup"] is None


def test_temperatures_stand_side_by_side_and_drawn_outputs_are_held_to_nothing(judged_by: Path, tmp_path: Path) -> None:
    greedy = [*rows(PLAIN, 2.0, [1, 2, 3], (0, 0)), *rows("way", 1.0, [1, 2, 3], (1,))]
    drawn = [*rows(PLAIN, 2.0, [1, 2, 3], (0, 0)), *rows("way", 0.5, [9, 9, 9], (1,))]
    report = make_report({0: greedy, 1: drawn}, ways("way"), judged_by, tmp_path, seed=0)
    assert report.failures == []
    both = next(grid for grid in report.grids if grid.title == "over all tasks, by temperature")
    assert both.columns == ["way", "×, greedy", "τ, greedy", "×, temperature 1", "τ, temperature 1"]
    assert both.rows[1] == ["way", "2.00 (2.00 to 2.00)", "2.00", "4.00 (4.00 to 4.00)", "2.00"]
    assert not any("another distribution" in note for note in report.notes)


def test_a_rule_that_is_not_lossless_is_named_where_nothing_else_would_tell(judged_by: Path, tmp_path: Path) -> None:
    drawn = [*rows(PLAIN, 2.0, [1, 2, 3], (0, 0)), *rows("loose", 0.5, [9, 9, 9], (1,))]
    report = make_report({1: drawn}, ways("loose", verify={"name": "typical"}), judged_by, tmp_path, seed=0)
    assert any("another distribution than the target: loose" in note for note in report.notes)


def test_questions_that_are_all_too_long_are_an_error(judged_by: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="none of the 1 questions fits the context"):
        told = [{"prompt_id": "1-0", "domain": "qa", "fits": False}]
        make_report({0: told}, ways("a"), judged_by, tmp_path, seed=0)


def write(file: Path, *rows: dict[str, object]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def asked(name: str, *roles: str, domain: str = "chat") -> dict[str, object]:
    messages = [{"role": role, "content": f"{role} {number}"} for number, role in enumerate(roles)]
    return {"id": name, "domain": domain, "messages": messages, "category": "writing", "multi_turn": len(roles) > 1}


def test_questions_are_sorted_by_task_and_cut_to_so_many_of_each(tmp_path: Path) -> None:
    file = write(tmp_path / "q.jsonl", *(asked(f"{n}", "user", domain="ab"[n % 2]) for n in range(6)))
    assert {task: [q.id for q in found] for task, found in read_questions(file, 0).items()} == {
        "a": ["0", "2", "4"],
        "b": ["1", "3", "5"],
    }
    few = read_questions(file, 2)
    assert [len(found) for found in few.values()] == [2, 2]
    assert fingerprint(few) != fingerprint(read_questions(file, 0))


def test_each_message_of_the_user_that_has_no_answer_is_a_turn(tmp_path: Path) -> None:
    rows = asked("1", "system", "user", "user"), asked("2", "user", "assistant", "user")
    first, second = read_questions(write(tmp_path / "q.jsonl", *rows), 0)["chat"]
    assert (first.turns, second.turns) == ([2, 3], [3])
    assert [m["content"] for m in chat_before(first, 3, {2: "said"})] == ["system 0", "user 1", "said", "user 2"]
    assert [m["content"] for m in chat_before(second, 3, {})] == ["user 0", "assistant 1", "user 2"]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "has no rows"),
        ([asked("1", "user"), asked("1", "user")], "line 2: id 1 occurs twice"),
        ([{"id": "1", "messages": [{"role": "user", "content": "a"}]}], r'line 1: key "domain" is missing'),
        ([asked("1", "user", "assistant")], "line 1: no message of the user waits for an answer"),
        ([{**asked("1", "user"), "messages": []}], 'line 1: key "messages"'),
    ],
)
def test_a_file_that_does_not_fit_is_refused_with_the_place(
    tmp_path: Path, rows: list[dict[str, object]], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        read_questions(write(tmp_path / "q.jsonl", *rows), 0)
