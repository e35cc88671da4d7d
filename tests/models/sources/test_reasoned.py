import json
from pathlib import Path

import pytest

from models.sources import reasoned, split

GSM8K = Path(__file__).parents[3].parent / "shared" / "data" / "gsm8k.jsonl"
ROW = {"domain": "math", "messages": [{"role": "user", "content": "2 + 3?"}], "reference": "2 and 3\n#### make\n#### 5"}


def of(file: Path, task: str, **more: str) -> reasoned.Params:
    return reasoned.Params(path=str(file), task=task, **more)


def said(file: Path, task: str, **more: str) -> list[tuple[str, str]]:
    found = reasoned.documents(of(file, task, **more))
    return [tuple(message.content for message in document.content) for document in found]


def written(tmp_path: Path, *rows: dict) -> Path:
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path / "rows.jsonl"


def test_a_row_is_an_answer_or_a_rationale_by_hand(tmp_path: Path) -> None:
    file = written(tmp_path, ROW, ROW)
    assert said(file, "answer") == [("2 + 3?", "5")]
    assert said(file, "rationale") == [("Explain step by step: 2 + 3?", "2 and 3\n#### make")]
    assert said(file, "rationale", instruction="Why? ") == [("Why? 2 + 3?", "2 and 3\n#### make")]
    [prompt] = reasoned.prompts(of(file, "answer"))
    assert [message.content for message in prompt.messages] == ["2 + 3?"]
    assert (prompt.domain, prompt.group) == ("math", "rows.jsonl:line 1")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"reference": "no answer"}, "line 1: column \"reference\" has no working and answer around '####'"),
        ({"reference": "#### 5"}, "has no working and answer"),
        ({"reference": "working ####  "}, "has no working and answer"),
        ({"reference": None}, 'column "reference" is None, wanted a text'),
        ({"messages": []}, 'line 1: column "messages": wanted a question'),
    ],
)
def test_a_row_without_both_is_named(tmp_path: Path, change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        reasoned.documents(of(written(tmp_path, ROW | change), "answer"))


@pytest.mark.skipif(not GSM8K.is_file(), reason="the shared data is not here")
def test_gsm8k_is_read_and_a_question_is_on_the_same_side_in_both_tasks() -> None:
    answers, rationales = (reasoned.documents(of(GSM8K, task)) for task in ("answer", "rationale"))
    assert len(answers) > 500
    assert len(rationales) == len(answers)
    assert all(len(document.content[-1].content) < 20 for document in answers)
    shares = {"train": 0.8, "held_out": 0.2}
    sides = [split(documents, shares, seed=0) for documents in (answers, rationales)]
    assert [one.group for one in sides[0]["train"]] == [one.group for one in sides[1]["train"]]
