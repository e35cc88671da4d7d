import json
from pathlib import Path

import pytest

from tasks.measure.questions import chat_before, fingerprint, read_questions


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
