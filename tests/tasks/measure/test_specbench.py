"""Spec-Bench on the two-layer target: all are asked the same, outputs are held to plain decoding, speeds are paired."""

import json
from pathlib import Path

import pytest

from infra.views.results import Report
from models.core.evaluation.golden import save_golden
from models.sources import Message
from tasks.measure import specbench
from tasks.measure.configurations import SERVED, Configuration, read_configurations
from tasks.measure.run import Bar
from tasks.measure.specbench import ALL, PLAIN, Question, Row, fingerprint, read_questions
from tests.tasks.measure.benches import open_target

QUESTIONS = [
    Question(id=id, domain=domain, messages=tuple(Message(role="user", content=text) for text in texts))
    for id, domain, texts in (("1", "mt", ["a b c", "again"]), ("2", "qa", ["a b c"]), ("3", "qa", ["x" * 400]))
]


@pytest.fixture(scope="module")
def measured(tiny_target: Path, tiny_draft: Path, bar: Bar) -> list[Row]:
    target = open_target(tiny_target, tiny_draft, max_model_len=160)
    return specbench._answer(target, read_configurations(None, 3), QUESTIONS, 12, bar)


@pytest.mark.slow
def test_every_turn_is_answered_in_every_way_from_the_same_chat(measured: list[Row]) -> None:
    sides = [PLAIN, *read_configurations(None, 3)]
    asked = [row["prompt_id"] for row in measured if row["fits"]]
    assert asked == [name for name in ("1-0", "1-1", "2-0") for _ in sides]
    assert [row["side"] for row in measured[: len(sides)]] == sides
    assert [row["prompt_id"] for row in measured if not row["fits"]] == ["3-0"]
    assert all(row["seconds"] > 0 for row in measured if row["fits"])


def ways(*names: str, **engine: object) -> dict[str, Configuration]:
    return {name: Configuration(draft=SERVED, engine=engine) for name in names}


def rows(side: str, seconds: float, token_ids: list[int], accepted: tuple[int, ...]) -> list[Row]:
    about = {"side": side, "domain": "qa", "fits": True, "gaps": [5.0] * len(token_ids), "token_ids": token_ids}
    steps = {"drafted_per_step": [2] * len(accepted), "accepted_per_step": accepted, "seconds": seconds}
    steps["decode_s"] = seconds - 0.25
    return [{"prompt_id": f"{number}-0", **about, **steps} for number in range(3)]


def report_of(told: dict[float, list[Row]], asked: dict[str, Configuration], folder: Path) -> Report:
    """Make a report of a target with the threshold that outputs are judged at."""
    save_golden(folder, [], 1e-3)
    return specbench.make_report(told, asked, folder, folder, seed=0)


PLAIN_ROWS = rows(PLAIN, 2.0, [1, 2, 3], (0, 0))


def test_figures_are_worked_by_hand(tmp_path: Path) -> None:
    told = [
        *({**row, "drafted_per_step": [0] * 4} for row in rows(PLAIN, 2.0, [1, 2, 3, 4, 5], (0, 0, 0, 0))),
        *rows("fast", 0.5, [1, 2, 3, 4, 5], (2, 0)),
        *rows("slow", 4.0, [1, 2, 3, 4, 5], (0, 2)),
    ]
    found = report_of({0: told}, ways("fast", "slow"), tmp_path).figures["temperatures"]["0"]["tasks"][ALL]
    assert [found[way]["speedup"]["overall"]["value"] for way in ("fast", "slow")] == [4.0, 0.5]
    assert found["fast"]["decoding_speedup"]["overall"]["value"] == 7.0
    assert found["fast"]["tau"]["value"] == 2.0
    assert found["fast"]["acceptance_by_place"] == [0.5, 0.5]


def test_another_output_fails_the_benchmark_and_has_no_speed(tmp_path: Path) -> None:
    report = report_of({0: [*PLAIN_ROWS, *rows("wrong", 0.1, [1, 9, 3], (2,))]}, ways("wrong"), tmp_path)
    assert report.failures == ["wrong: 3 of 3 outputs differ from plain decoding"]
    assert report.figures["temperatures"]["0"]["tasks"][ALL]["wrong"]["speedup"] is None


def test_temperatures_stand_side_by_side_and_drawn_outputs_are_held_to_nothing(tmp_path: Path) -> None:
    drawn = [*PLAIN_ROWS, *rows("way", 0.5, [9, 9, 9], (1,))]
    report = report_of({0: [*PLAIN_ROWS, *rows("way", 1.0, [1, 2, 3], (1,))], 1: drawn}, ways("way"), tmp_path)
    assert report.failures == []
    both = next(grid for grid in report.grids if grid.title == "over all tasks, by temperature")
    assert both.columns == ["way", "×, greedy", "τ, greedy", "×, temperature 1", "τ, temperature 1"]
    assert both.rows[1] == ["way", "2.00 (2.00 to 2.00)", "2.00", "4.00 (4.00 to 4.00)", "2.00"]
    lossy = "another distribution than the target: way"  # which nothing else would tell
    assert not any(lossy in note for note in report.notes)
    report = report_of({1: drawn}, ways("way", verify={"name": "typical"}), tmp_path)
    assert any(lossy in note for note in report.notes)


def test_questions_that_are_all_too_long_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="none of the 1 questions fits the context"):
        report_of({0: [{"prompt_id": "1-0", "domain": "qa", "fits": False}]}, ways("a"), tmp_path)


def write(file: Path, *rows: dict[str, object]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def asked(name: str, *roles: str, **given: object) -> dict[str, object]:
    messages = [{"role": role, "content": f"{role} {number}"} for number, role in enumerate(roles)]
    said = {"domain": "chat", "messages": messages, "category": "writing", "multi_turn": len(roles) > 1}
    return {"id": name, **said, **given}


def test_questions_are_sorted_by_task_and_cut_to_so_many_of_each(tmp_path: Path) -> None:
    file = write(tmp_path / "q.jsonl", *(asked(f"{n}", "user", domain="ab"[n % 2]) for n in range(6)))
    every, few = read_questions(file, 0), read_questions(file, 2)
    assert {task: [q.id for q in found] for task, found in every.items()} == {"a": [*"024"], "b": [*"135"]}
    assert [len(found) for found in few.values()] == [2, 2]
    assert fingerprint(few) != fingerprint(every)


def test_each_message_of_the_user_that_has_no_answer_is_a_turn(tmp_path: Path) -> None:
    rows = asked("1", "system", "user", "user"), asked("2", "user", "assistant", "user")
    first, second = read_questions(write(tmp_path / "q.jsonl", *rows), 0)["chat"]
    assert (first.turns, second.turns) == ([2, 3], [3])
    for question, said, chat in (
        (first, {2: "said"}, ["system 0", "user 1", "said", "user 2"]),
        (second, {}, ["user 0", "assistant 1", "user 2"]),
    ):
        assert [message["content"] for message in specbench.chat_before(question, 3, said)] == chat


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "has no rows"),
        ([asked("1", "user"), asked("1", "user")], "line 2: id 1 occurs twice"),
        ([{"id": "1", "messages": [{"role": "user", "content": "a"}]}], r'line 1: key "domain" is missing'),
        ([asked("1", "user", "assistant")], "line 1: no message of the user waits for an answer"),
        ([asked("1", "user", messages=[])], 'line 1: key "messages"'),
    ],
)
def test_a_file_that_does_not_fit_is_refused_with_the_place(
    tmp_path: Path, rows: list[dict[str, object]], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        read_questions(write(tmp_path / "q.jsonl", *rows), 0)
