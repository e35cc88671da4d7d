import gzip
import json
from pathlib import Path

import datasets
import pytest

from models.sources import Message, named, split
from models.sources.dataset import Params, documents, prompts

DATA = Path(__file__).parents[4] / "shared" / "data"
CHAT = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
IMAGE = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}


def of(tmp_path: Path, *rows: dict[str, object] | str, **changed: object) -> Params:
    """Write rows, or lines that are none, and return settings that read their texts."""
    file = tmp_path / "q.jsonl"
    file.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return Params(**{"path": str(file), "column": "text", "domain": "d", **changed})


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A folder of four questions, with the cache beside it."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "set").mkdir()
    of(tmp_path / "set", *({"question": f"question {number}", "topic": "math"} for number in (1, 2, 3, 1)))
    return str(tmp_path / "set")


def test_chats_are_read_from_json_lines(tmp_path: Path) -> None:
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    (prompt,) = prompts(Params(path=of(tmp_path, {"messages": chat, "domain": "chat", "id": "x"}).path))
    assert prompt.messages == (Message(role="system", content="Be brief."), Message(role="user", content="Hi"))
    assert (prompt.domain, prompt.group) == ("chat", "q.jsonl:line 1")


def test_a_folder_and_a_file_with_the_same_rows_give_the_same_prompts(folder: str) -> None:
    read = [prompts(Params(path=path, column="question", domain="d")) for path in (folder, f"{folder}/q.jsonl")]
    assert [prompt.id for prompt in read[0]] == [prompt.id for prompt in read[1]]
    asked = [(Message(role="user", content=f"question {number}"),) for number in (1, 2, 3)]
    assert [prompt.messages for prompt in read[0]] == asked
    assert {prompt.domain for prompt in read[0]} == {"d"}
    assert [found[2].group for found in read] == ["set:row 3", "q.jsonl:line 3"]


def test_a_text_column_becomes_texts_and_a_chat_keeps_its_answer(tmp_path: Path) -> None:
    params = of(tmp_path, {"text": " def f(): ...", "messages": CHAT})
    (text,) = documents(params)
    assert (text.content, text.group) == (" def f(): ...", "q.jsonl:line 1")
    (whole,) = documents(Params(path=params.path, domain="d"))
    assert [message.content for message in whole.content] == ["a", "b"]


def test_rows_of_one_group_stay_on_one_side(tmp_path: Path) -> None:
    rows = [{"text": f"{number}", "user": number % 20} for number in range(200)]
    found = prompts(of(tmp_path, *rows, group_column="user"))
    assert {prompt.group for prompt in found} == {f"q.jsonl:{user}" for user in range(20)}
    parts = split(found, {"train": 0.6, "held_out": 0.4}, seed=0)
    train, held_out = ({prompt.group for prompt in part} for part in parts.values())
    assert not train & held_out


def test_a_recipes_table_reads_of_one_file_the_rows_of_its_domain_and_those_that_name_none(tmp_path: Path) -> None:
    rows = [{"text": "a", "domain": "billing"}, {"text": "b", "domain": "travel"}, {"text": "c"}]
    found = prompts(named(of(tmp_path, *rows, domain=""), "billing"))
    assert [(one.messages[0].content, one.domain) for one in found] == [("a", "billing"), ("c", "billing")]
    assert len(prompts(named(of(tmp_path, *rows, domain="billing"), "billing"))) == 3  # of all items, the recipe says
    assert len(prompts(named(of(tmp_path, *rows[:2], domain="", only="travel"), "tours"))) == 1
    with pytest.raises(
        ValueError, match='no row is of domain "trave" .did you mean "travel".*; there are: billing, travel;'
    ):
        prompts(named(of(tmp_path, *rows[:2], domain=""), "trave"))


def test_blank_lines_and_copies_are_left_out_and_no_more_is_read_than_a_count_takes(tmp_path: Path) -> None:
    params = of(tmp_path, {"text": "a"}, "", {"text": "a"}, {"text": "b"}, "no JSON", count=2)
    assert [(one.messages[0].content, one.group) for one in prompts(params)] == [
        ("a", "q.jsonl:line 1"),
        ("b", "q.jsonl:line 4"),
    ]


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_a_missing_column_is_refused_with_those_there_are(folder: str, kind: str) -> None:
    path = {"folder": folder, "file": f"{folder}/q.jsonl"}[kind]
    for missing, columns in (("messages", {}), ("user", {"column": "question", "group_column": "user"})):
        with pytest.raises(ValueError, match=rf'(row|line) 1: no column "{missing}"; there are: question, topic'):
            prompts(Params(path=path, domain="math", **columns))


def test_a_file_without_a_group_splits_or_rows_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match='line 1: column "user" names no group'):
        prompts(of(tmp_path, {"text": "a", "user": ""}, group_column="user"))
    with pytest.raises(ValueError, match="q.jsonl is a file, which has no splits and subsets; got 'test', ''"):
        prompts(of(tmp_path, split="test"))
    with pytest.raises(ValueError, match="holds no rows"):
        prompts(of(tmp_path))


def test_a_slice_of_a_split_can_be_asked_for_and_an_unknown_split_is_refused(folder: str) -> None:
    assert len(prompts(Params(path=folder, split="train[:2]", column="question", domain="math"))) == 2
    with pytest.raises(ValueError, match="Unknown split"):
        prompts(Params(path=folder, split="tset", column="question", domain="math"))


def test_a_folder_without_data_or_hub_out_of_reach_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for path in (str(tmp_path), "nobody/no.thing"):
        with pytest.raises(ValueError, match=f'data set "{path}" is neither on a hub in reach'):
            prompts(Params(path=path))


@pytest.mark.skipif(not DATA.is_dir(), reason="no ../shared/data beside the checkout")
def test_the_shared_query_streams_can_be_read() -> None:
    for name, domain in {"gsm8k": "math", "tool_calls": "tool_calling", "spec_bench_400": "mt_bench"}.items():
        found = prompts(Params(path=str(DATA / f"{name}.jsonl")))
        assert len(found) > 350
        assert found[0].domain == domain


def test_a_row_that_cannot_be_used_is_left_out_and_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    chats = ({"messages": chat} for chat in (CHAT, [IMAGE, CHAT[1]], [IMAGE]))
    params = of(tmp_path, *chats, {"messages": CHAT, "weight": 0}, "no JSON", column="messages")
    assert [prompt.group for prompt in prompts(params)] == ["q.jsonl:line 1"]
    assert [document.group for document in documents(params)] == ["q.jsonl:line 1"]
    assert caplog.messages == [caplog.messages[0]] * 2
    assert "skipped 1 of weight 0, 1 unreadable, 2 with parts that are no text" in caplog.messages[0]
    for place in (2, 4, 5):
        assert f"{params.path}, line {place}: " in caplog.messages[0]


def test_a_chat_keeps_its_tools_and_calls(tmp_path: Path) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    tool = {"type": "function", "function": {"name": "f"}}
    chat = [CHAT[0], {"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "content": "r"}]
    params = of(tmp_path, {"messages": chat, "tools": json.dumps([tool])}, column="messages")
    [prompt], [document] = prompts(params), documents(params)
    assert (prompt.tools, prompt.messages[1].tool_calls) == ((tool,), (call,))
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
