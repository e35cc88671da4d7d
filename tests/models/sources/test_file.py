"""Prompts out of local files."""

import json
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from models import catalog
from models.sources import Message
from models.sources.file import Params, prompts

DATA = Path(__file__).parents[4] / "shared" / "data"


def write_jsonl(path: Path, rows: list[object]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_chats_are_read_from_json_lines(tmp_path: Path) -> None:
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    path = write_jsonl(tmp_path / "chats.jsonl", [{"messages": chat, "domain": "chat", "id": "x"}])
    (prompt,) = prompts(Params(path=path))
    assert prompt.messages == (Message(role="system", content="Be brief."), Message(role="user", content="Hi"))
    assert (prompt.domain, prompt.group) == ("chat", "chats.jsonl:line 1")


def test_parquet_and_json_lines_with_the_same_rows_give_the_same_prompts(tmp_path: Path) -> None:
    rows = [{"messages": [{"role": "user", "content": f"question {i}"}]} for i in range(5)]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    write_jsonl(tmp_path / "rows.jsonl", rows)
    read = {kind: prompts(Params(path=tmp_path / f"rows.{kind}", domain="d")) for kind in ("jsonl", "parquet")}
    assert [p.id for p in read["jsonl"]] == [p.id for p in read["parquet"]]
    assert read["parquet"][0].group == "rows.parquet:row 1"


def test_a_text_column_becomes_one_user_message(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "q.jsonl", [{"question": "What is 2 + 2?"}])
    (prompt,) = prompts(Params(path=path, column="question", domain="math"))
    assert prompt.messages == (Message(role="user", content="What is 2 + 2?"),)
    assert prompt.domain == "math"


def test_a_recipe_gives_the_path_as_text(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "q.jsonl", [{"text": "a"}])
    params = catalog.parse("sources", {"name": "file", "path": str(path), "column": "text", "domain": "d"})
    assert len(catalog.load("sources", "file").prompts(params)) == 1


def test_a_group_column_keeps_rows_together(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "q.jsonl", [{"text": t, "user": u} for t, u in [("a", "x"), ("b", "x"), ("c", "y")]])
    found = prompts(Params(path=path, column="text", domain="d", group_column="user"))
    assert [prompt.group for prompt in found] == ["q.jsonl:x", "q.jsonl:x", "q.jsonl:y"]


def test_blank_lines_and_exact_copies_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "q.jsonl"
    path.write_text('{"text": "a"}\n\n{"text": "b"}\n{"text": "a"}\n')
    assert [p.group for p in prompts(Params(path=path, column="text", domain="d"))] == [
        "q.jsonl:line 1",
        "q.jsonl:line 3",
    ]


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (b"", "holds no rows"),
        (b'{"text": "a"}\n{"text": \n', "line 2: not JSON"),
        (b'{"text": "a"}\n{"text": "\xff"}\n', "line 2: not JSON"),
        (b'{"text": "a"}\n[1]\n', "line 2: wanted an object, got list"),
        (b'{"text": "a"}\n{"prompt": "b"}\n', r'line 2: no column "text"; there are: prompt'),
        (
            b'{"text": "a"}\n{"text": null}\n',
            r'line 2: column "text": wanted a text or a list of messages, got NoneType',
        ),
    ],
)
def test_a_wrong_file_is_refused_with_line_and_field(tmp_path: Path, content: bytes, fault: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=fault):
        prompts(Params(path=path, column="text", domain="d"))


def test_a_row_without_its_group_is_refused(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "q.jsonl", [{"text": "a"}])
    with pytest.raises(ValueError, match='line 1: column "user" names no group'):
        prompts(Params(path=path, column="text", domain="d", group_column="user"))


@pytest.mark.parametrize("name", ["absent.jsonl", "absent.parquet"])
def test_a_missing_file_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="no such file"):
        prompts(Params(path=tmp_path / name))


def test_another_kind_of_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"wanted a file ending in \.jsonl or \.parquet"):
        prompts(Params(path=tmp_path / "rows.csv"))


def test_a_broken_parquet_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    path.write_bytes(b"PAR1 but no more")
    with pytest.raises(ValueError, match="not a Parquet file"):
        prompts(Params(path=path))


@pytest.mark.skipif(not DATA.is_dir(), reason="no ../shared/data beside the checkout")
def test_the_shared_query_streams_can_be_read() -> None:
    for name, domain in {"gsm8k": "math", "tool_calls": "tool_calling", "spec_bench_400": "mt_bench"}.items():
        found = prompts(Params(path=DATA / f"{name}.jsonl"))
        assert len(found) > 350
        assert found[0].domain == domain
