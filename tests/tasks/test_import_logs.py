"""Logs of another service, into the query log of this one."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from infra.artifacts import staged
from infra.consent import group_of, subject_of
from infra.erase import erase_subject
from infra.querylog import QueryLog
from infra.registry import Registry
from infra.secret import home_secret
from infra.settings import load_settings
from models.targets.random import byte_tokenizer
from tasks.import_logs import import_logs
from tasks.register import identity
from tasks.stages.samples import usable
from tests.models.tokenizers import byte_ids

TOKENIZER = byte_tokenizer()
CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello there"}]
Write = Callable[..., Path]


def encode(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


@pytest.fixture(scope="module")
def home(store: Path, tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home whose registry has a champion target; tests copy it."""
    from models.targets import describe

    home = tmp_path_factory.mktemp("home")
    shutil.copy(store, home)
    registry = Registry(f"sqlite:///{home}/mlflow.db", home / "artifacts" / "mlflow")
    with staged(home / "target") as directory:
        shutil.copytree(tiny_target, directory, dirs_exist_ok=True)
    version = registry.register("target", home / "target", identity(describe(tiny_target)).to_tags())
    registry.promote("target", version.number)
    registry.download(version, home / "cache")
    return home


@pytest.fixture
def log(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> QueryLog:
    monkeypatch.setenv("REDRAFT_HOME", str(home))
    monkeypatch.setenv("REDRAFT_QUERYLOG", str(tmp_path / "queries.db"))
    return QueryLog(load_settings().querylog)


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def make(*rows: object, name: str = "old.jsonl") -> Path:
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path

    return make


def test_chats_questions_and_token_ids_become_rows_that_can_be_trained_on(log: QueryLog, write: Write) -> None:
    prompt, completion = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n", "hello there<|im_end|>"
    ids = {"prompt_ids": encode("abc"), "completion_ids": encode("defg"), "temperature": 0, "domain": "code"}
    file = write({"messages": CHAT}, {"prompt": "one?", "completion": "two", "subject": "ann"}, ids)
    report = import_logs.fn([file], max_len=256)
    assert report.line() == "read 3, added 3, repeated 0, skipped 0"
    first, second, third = log.rows(1, 9)
    assert (first.prompt, first.completion) == (prompt, completion)
    assert (first.prompt_ids, first.completion_ids) == (encode(prompt), encode(completion))
    assert (first.domain, first.sampling, first.finish_reason) == ("default", {"temperature": 1.0}, "stop")
    assert (first.consent, first.target_version, first.draft_version, first.speculating) == ("full", 1, None, False)
    assert second.prompt == prompt.replace("hi", "one?")
    assert second.subject == subject_of(None, "ann")
    assert (third.prompt_ids, third.domain, third.finish_reason) == (encode("abc"), "code", "length")
    samples, left_out = usable(log.rows(1, 9), target_version=1, max_share_per_key=1, min_rows=1)
    assert [sample.temperature for sample in samples] == [1.0, 1.0, 0.0]
    assert not left_out


@pytest.mark.slow
def test_importing_twice_adds_nothing_whatever_the_domain_and_the_file(log: QueryLog, write: Write) -> None:
    rows = [{"prompt": f"question {i}", "completion": "answer"} for i in range(600)]
    assert import_logs.fn([write(*rows, rows[0])], max_len=256).line() == "read 601, added 600, repeated 1, skipped 0"
    parquet.write_table(pyarrow.Table.from_pylist(rows), log.path.with_name("again.parquet"))
    again = import_logs.fn([log.path.with_name("again.parquet")], max_len=256, domain="chat")
    assert again.line() == "read 600, added 0, repeated 600, skipped 0"
    assert log.stats().per_domain == {"default": 600}


@pytest.mark.parametrize("field", ["subject", "user", "safety_identifier"])
def test_whoever_a_row_names_can_be_erased_by_that_name(field: str, log: QueryLog, write: Write) -> None:
    import_logs.fn([write({"messages": CHAT, field: "ann"}, {"prompt": "one?", "completion": "two"})], max_len=256)
    assert erase_subject(load_settings(), "ann").rows == 1
    assert [row.subject for row in log.rows(1, 9)] == [None]


def test_a_group_is_hashed_apart_from_those_of_clients(log: QueryLog, write: Write) -> None:
    rows = [{"prompt": f"question {name}", "completion": "answer", "group": name} for name in ("g", "h", "")]
    import_logs.fn([write(*rows, {"prompt": "another", "completion": "answer", "group": "g"})], max_len=256)
    first, second, without, fourth = [row.group for row in log.rows(1, 9)]
    assert first == fourth != second
    assert without is None
    secret = home_secret(load_settings().home)
    assert first not in (group_of(secret, None, "g"), group_of(secret, subject_of("a key", None), "g"))


def test_an_exported_row_comes_back_as_it_was(log: QueryLog, write: Write) -> None:
    import_logs.fn(
        [write({"messages": CHAT, "subject": "ann", "user": "a session", "group": "g"} | {"temperature": 0.5})],
        max_len=256,
    )
    (row,) = log.rows(1, 9)
    assert row.aliases == [subject_of(None, "a session")]
    exported = {**row.model_dump(), "temperature": row.sampling["temperature"]}
    report = import_logs.fn([write(exported, name="exported.jsonl")], max_len=256)
    assert (report.num_added, report.num_repeated) == (0, 1)
    log.erase(str(row.subject))
    import_logs.fn([log.path.with_name("exported.jsonl")], max_len=256)
    (again,) = log.rows(1, 9)
    changing = {"seq", "time_ms"}
    assert again.model_dump(exclude=changing) == row.model_dump(exclude=changing)


def test_texts_are_scrubbed_and_markers_in_them_stay_text(log: QueryLog, write: Write) -> None:
    import_logs.fn(
        [write({"prompt": "<|im_end|> ann@example.org", "completion": "call +44 20 7946 0958"})], max_len=256
    )
    (row,) = log.rows(1, 9)
    assert row.prompt == "<|im_start|>user\n<|im_end|> [EMAIL]<|im_end|>\n<|im_start|>assistant\n"
    assert row.completion == "call [PHONE]<|im_end|>"
    assert row.prompt_ids == byte_ids([{"role": "user", "content": "<|im_end|> [EMAIL]"}])
    assert b"example.org" not in log.path.read_bytes() + log.path.with_name("queries.db-wal").read_bytes()


BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"text": "a"}, "with wrong fields", "wanted prompt_ids and completion_ids, messages, or prompt.*; got text"),
    ({"prompt_ids": [1], "completion_ids": []}, "with wrong fields", "completion_ids: wanted a list of whole numbers"),
    ({"prompt_ids": [1], "completion_ids": [True]}, "with wrong fields", "completion_ids: wanted a list of whole"),
    (
        {"prompt_ids": [1, 259], "completion_ids": [1]},
        "with unknown tokens",
        r"prompt_ids\[1\] is 259, wanted 0 to 258",
    ),
    ({"prompt_ids": [-1], "completion_ids": [1]}, "with unknown tokens", r"prompt_ids\[0\] is -1"),
    ({"messages": CHAT[:1]}, "without an answer", "wanted a question, and last the assistant's answer"),
    ({"messages": "hi"}, "with wrong fields", "messages: wanted a list of messages, got str"),
    ({"messages": [{"role": "bot", "content": "a"}, CHAT[1]]}, "with wrong fields", "\"role\" is 'bot'"),
    ({"prompt": "a\ud800", "completion": "b"}, "with wrong fields", "valid Unicode"),
    ({"prompt": "a", "completion": " "}, "with wrong fields", "message 1: .*not blank"),
    ({"prompt": "a" * 256, "completion": "b"}, "too long", "wanted at most 256 tokens, the engine's context; got 277"),
    ({"messages": CHAT, "domain": "Chat!"}, "with an invalid domain", "domain is 'Chat!', wanted 1 to 32"),
    (
        {"messages": CHAT, "temperature": -1},
        "with an invalid temperature",
        "temperature is -1, wanted a number from 0 on",
    ),
    ({"messages": CHAT, "temperature": True}, "with an invalid temperature", "temperature is True"),
    ({"messages": CHAT, "group": "my group"}, "with an invalid group", "1 to 128 printable ASCII .*, got 8 characters"),
    ({"messages": CHAT, "subject": 7}, "with an invalid subject", "subject is a int, wanted a text"),
    ({"messages": CHAT, "temperature": 10**400}, "with wrong fields", "OverflowError: int too large"),
    ({"messages": CHAT, "subject": "a\ud800"}, "with wrong fields", "UnicodeEncodeError: .*surrogates not allowed"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("row", "reason", "fault"), BAD)
def test_a_row_that_cannot_be_used_is_counted_with_its_reason_or_refused_with_its_place(
    log: QueryLog, write: Write, row: dict[str, Any], reason: str, fault: str
) -> None:
    file = write({"messages": CHAT}, row)
    with pytest.raises(ValueError, match=f"old.jsonl, line 2: .*{fault}"):
        import_logs.fn([file], max_len=256, strict=True)
    assert log.stats().total == 0
    report = import_logs.fn([file], max_len=256)
    assert report.line() == f"read 2, added 1, repeated 0, skipped 1: 1 {reason}"
    assert report.examples[0].startswith(f"{file}, line 2: ")


def test_a_line_that_is_no_json_is_skipped_and_counted(log: QueryLog, write: Write) -> None:
    file = write({"messages": CHAT})
    file.write_text(file.read_text() + "{\n[]\n")
    assert import_logs.fn([file], max_len=256).line() == "read 3, added 1, repeated 0, skipped 2: 2 unreadable"


def test_a_domain_for_all_rows_is_checked_first(log: QueryLog, write: Write) -> None:
    with pytest.raises(ValueError, match="domain is 'No Domain'"):
        import_logs.fn([write({"messages": CHAT})], max_len=256, domain="No Domain")


@pytest.mark.slow
def test_without_a_target_nothing_can_be_imported(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REDRAFT_HOME", str(tmp_path / "empty"))
    with pytest.raises(ValueError, match="no champion target yet.*redraft build"):
        import_logs.fn([write({"messages": CHAT})], max_len=256)
