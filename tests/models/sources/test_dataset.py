"""Prompts out of files, folders and, where none can be reached, the error about the hub."""

import gzip
import json
from pathlib import Path

import datasets
import pytest

from models.sources import Message, split
from models.sources.dataset import Params, documents, prompts

DATA = Path(__file__).parents[4] / "shared" / "data"


def write_jsonl(path: Path, rows: list[object]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A folder of four questions, with the cache beside it."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "set").mkdir()
    rows = [{"question": f"question {i}", "topic": "math"} for i in (1, 2, 3, 1)]
    write_jsonl(tmp_path / "set" / "train.jsonl", list(rows))
    return str(tmp_path / "set")


def test_chats_are_read_from_json_lines(tmp_path: Path) -> None:
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    path = write_jsonl(tmp_path / "chats.jsonl", [{"messages": chat, "domain": "chat", "id": "x"}])
    (prompt,) = prompts(Params(path=path))
    assert prompt.messages == (Message(role="system", content="Be brief."), Message(role="user", content="Hi"))
    assert (prompt.domain, prompt.group) == ("chat", "chats.jsonl:line 1")


def test_a_folder_and_a_file_with_the_same_rows_give_the_same_prompts(folder: str) -> None:
    read = [prompts(Params(path=path, column="question", domain="d")) for path in (folder, f"{folder}/train.jsonl")]
    assert [[prompt.id for prompt in found] for found in read] == [[prompt.id for prompt in read[0]]] * 2
    asked = [(Message(role="user", content=f"question {number}"),) for number in (1, 2, 3)]
    assert [prompt.messages for prompt in read[0]] == asked
    assert {prompt.domain for prompt in read[0]} == {"d"}
    assert [found[2].group for found in read] == ["set:row 3", "train.jsonl:line 3"]


def test_a_text_column_becomes_texts_and_a_chat_keeps_its_answer(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    path = write_jsonl(tmp_path / "rows.jsonl", [{"text": " def f(): ...", "messages": chat, "domain": "d"}])
    (text,) = documents(Params(path=path, column="text"))
    assert (text.content, text.group) == (" def f(): ...", "rows.jsonl:line 1")
    (whole,) = documents(Params(path=path))
    assert [message.content for message in whole.content] == ["Hi", "Hello"]


def test_rows_of_one_group_stay_on_one_side(tmp_path: Path) -> None:
    rows = [{"text": f"{i}", "user": i % 20} for i in range(1, 201)]
    path = write_jsonl(tmp_path / "q.jsonl", list(rows))
    found = prompts(Params(path=path, column="text", domain="d", group_column="user"))
    assert {prompt.group for prompt in found} == {f"q.jsonl:{user}" for user in range(20)}
    parts = split(found, {"train": 0.6, "held_out": 0.4}, seed=0)
    train, held_out = ({prompt.group for prompt in part} for part in parts.values())
    assert not train & held_out


def test_blank_lines_and_exact_copies_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "q.jsonl"
    path.write_text('{"text": "a"}\n\n{"text": "b"}\n{"text": "a"}\n')
    found = prompts(Params(path=str(path), column="text", domain="d"))
    assert [prompt.group for prompt in found] == ["q.jsonl:line 1", "q.jsonl:line 3"]


def test_a_count_takes_different_prompts_from_the_start_and_reads_no_further(tmp_path: Path) -> None:
    path = tmp_path / "q.jsonl"
    path.write_text('{"text": "a"}\n{"text": "a"}\n{"text": "b"}\nno JSON\n')
    found = prompts(Params(path=str(path), column="text", domain="d", count=2))
    assert [prompt.messages[0].content for prompt in found] == ["a", "b"]


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_a_missing_column_is_refused_with_those_there_are(folder: str, kind: str) -> None:
    path = folder if kind == "folder" else f"{folder}/train.jsonl"
    with pytest.raises(ValueError, match=r'(row|line) 1: no column "messages"; there are: question, topic'):
        prompts(Params(path=path, domain="math"))
    with pytest.raises(ValueError, match=r'(row|line) 1: no column "user"; there are: question, topic'):
        prompts(Params(path=path, column="question", domain="math", group_column="user"))


def test_a_row_without_its_group_is_refused(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "q.jsonl", [{"text": "a", "user": ""}])
    with pytest.raises(ValueError, match='line 1: column "user" names no group'):
        prompts(Params(path=path, column="text", domain="d", group_column="user"))


def test_a_file_has_no_splits_and_an_empty_one_no_prompts(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "q.jsonl", [])
    with pytest.raises(ValueError, match="q.jsonl is a file, which has no splits and subsets; got 'test', ''"):
        prompts(Params(path=path, split="test"))
    with pytest.raises(ValueError, match="holds no rows"):
        prompts(Params(path=path))


def test_a_slice_of_a_split_can_be_asked_for(folder: str) -> None:
    assert len(prompts(Params(path=folder, split="train[:2]", column="question", domain="math"))) == 2


def test_an_unknown_split_is_refused(folder: str) -> None:
    with pytest.raises(ValueError, match="Unknown split"):
        prompts(Params(path=folder, split="tset", column="question", domain="math"))


def test_a_folder_without_data_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match='data set ".*empty" is neither on a hub'):
        prompts(Params(path=str(tmp_path / "empty")))


def test_a_hub_that_cannot_be_reached_gives_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match='data set "nobody/no.thing" is neither on a hub in reach'):
        prompts(Params(path="nobody/no.thing"))


@pytest.mark.skipif(not DATA.is_dir(), reason="no ../shared/data beside the checkout")
def test_the_shared_query_streams_can_be_read() -> None:
    for name, domain in {"gsm8k": "math", "tool_calls": "tool_calling", "spec_bench_400": "mt_bench"}.items():
        found = prompts(Params(path=str(DATA / f"{name}.jsonl")))
        assert len(found) > 350
        assert found[0].domain == domain


CHAT = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
IMAGE = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}


def test_a_row_that_cannot_be_used_is_left_out_and_logged_with_its_place(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{"messages": CHAT}, {"messages": [IMAGE, CHAT[1]]}, {"messages": [IMAGE]}, {"messages": CHAT, "weight": 0}]
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + "no JSON\n")
    params = Params(path=str(path), domain="d")
    assert [prompt.group for prompt in prompts(params)] == ["chats.jsonl:line 1"]
    assert [document.group for document in documents(params)] == ["chats.jsonl:line 1"]
    assert caplog.messages == [caplog.messages[0]] * 2
    assert "skipped 1 of weight 0, 1 unreadable, 2 with parts that are no text" in caplog.messages[0]
    for place in (2, 4, 5):
        assert f"{path}, line {place}: " in caplog.messages[0]


def test_a_chat_keeps_its_tools_and_calls(tmp_path: Path) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    tool = {"type": "function", "function": {"name": "f"}}
    chat = [CHAT[0], {"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "content": "r"}]
    path = write_jsonl(tmp_path / "calls.jsonl", [{"messages": chat, "tools": json.dumps([tool])}])
    (prompt,) = prompts(Params(path=path, domain="d"))
    assert (prompt.tools, prompt.messages[1].tool_calls) == ((tool,), (call,))
    (document,) = documents(Params(path=path, domain="d"))
    assert (document.tools, document.content) == (prompt.tools, prompt.messages)


def test_other_forms_than_chats_are_read_as_an_import_reads_them(tmp_path: Path) -> None:
    rows = [
        {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
        {"request": {"messages": [{"role": "user", "content": "c"}]}},
        {"custom_id": "1", "body": {"messages": [{"role": "user", "content": "d"}]}},
        {"prompt": "e", "completion": "f"},
    ]
    path = tmp_path / "forms.json.gz"
    path.write_bytes(gzip.compress(json.dumps(rows, indent=1).encode()))
    found = prompts(Params(path=str(path), domain="d"))
    assert [prompt.messages[0].content for prompt in found] == ["a", "c", "d", "e"]
