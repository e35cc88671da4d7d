"""Logs of another service, into the query log of this one."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from infra.consent import group_of, subject_of
from infra.erase import erase_subject
from infra.home import home_secret
from infra.querylog import QueryLog
from infra.registry import open_registry
from infra.settings import load_settings
from models import catalog
from models.chats import ChatEncoder
from models.recipe import load_recipe
from models.targets import describe
from models.targets.random import byte_tokenizer
from tasks.import_logs import import_logs, template_end
from tasks.register import identity
from tasks.stages.samples import usable
from tests.infra.rows import erase
from tests.models.tokenizers import byte_ids
from tests.tasks.made import target_files

TOKENIZER = byte_tokenizer()
CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello there"}]
Write = Callable[..., Path]


def encode(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


def with_champion(store: Path, home: Path, target: Path) -> Path:
    """Make a target the champion of an empty registry."""
    shutil.copy(store, home)
    settings = load_settings({"REDRAFT_HOME": str(home)})
    registry, files = open_registry(settings), target_files(target, home / "target").path
    version = registry.register("target", files, identity(describe(files)).to_tags())
    registry.promote("target", version.number)
    registry.download(version, settings.cache)
    return home


@pytest.fixture(scope="module")
def home(store: Path, tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home whose registry has a champion target."""
    return with_champion(store, tmp_path_factory.mktemp("home"), tiny_target)


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
    parquet.write_table(pyarrow.Table.from_pylist(rows), log.database.file.with_name("again.parquet"))
    again = import_logs.fn([log.database.file.with_name("again.parquet")], max_len=256, domain="chat")
    assert again.line() == "read 600, added 0, repeated 600, skipped 0"
    assert log.stats().per_domain == {"default": 600}


@pytest.mark.parametrize("field", ["subject", "user", "safety_identifier"])
def test_whoever_a_row_names_can_be_erased_by_that_name_and_nobody_else(
    field: str, log: QueryLog, write: Write
) -> None:
    asked = [{"messages": CHAT, field: name} for name in ("ann", "bob", "ann")]  # the same, so by name a row each
    report = import_logs.fn([write(*asked, {"prompt": "one?", "completion": "two"})], max_len=256)
    assert (report.num_added, report.num_repeated) == (3, 1)
    assert erase_subject(load_settings(), "ann").rows == 1
    assert [row.subject for row in log.rows(1, 9)] == [subject_of(None, "bob"), None]


def test_a_group_is_hashed_apart_from_those_of_clients(log: QueryLog, write: Write) -> None:
    groups = ("g", "h", "", "g")
    asked = ({"prompt": f"question {n}", "completion": "answer", "group": group} for n, group in enumerate(groups))
    import_logs.fn([write(*asked)], max_len=256)
    first, second, without, fourth = [row.group for row in log.rows(1, 9)]
    assert first == fourth != second
    assert without is None
    secret = home_secret(load_settings().home)
    assert first not in (group_of(secret, None, "g"), group_of(secret, subject_of("a key", None), "g"))


def test_an_exported_row_comes_back_as_it_was(log: QueryLog, write: Write) -> None:
    said = {"subject": "ann", "user": "a session", "group": "g", "temperature": 0.5}
    import_logs.fn([write({"messages": CHAT, **said})], max_len=256)
    (row,) = log.rows(1, 9)
    assert row.aliases == [subject_of(None, "a session")]
    exported = write({**row.model_dump(), "temperature": row.sampling["temperature"]}, name="exported.jsonl")
    report = import_logs.fn([exported], max_len=256)
    assert (report.num_added, report.num_repeated) == (0, 1)
    erase(log, str(row.subject))
    import_logs.fn([exported], max_len=256)
    (again,) = log.rows(1, 9)
    changing = {"seq", "time_ms"}
    assert again.model_dump(exclude=changing) == row.model_dump(exclude=changing)


def test_texts_are_scrubbed_and_markers_in_them_stay_text(log: QueryLog, write: Write) -> None:
    said = {"prompt": "<|im_end|> ann@example.org", "completion": "call +44 20 7946 0958"}
    import_logs.fn([write(said)], max_len=256)
    (row,) = log.rows(1, 9)
    assert row.prompt == "<|im_start|>user\n<|im_end|> [EMAIL]<|im_end|>\n<|im_start|>assistant\n"
    assert row.completion == "call [PHONE]<|im_end|>"
    assert row.prompt_ids == byte_ids([{"role": "user", "content": "<|im_end|> [EMAIL]"}])
    files = [log.database.file.with_name(name) for name in ("queries.db", "queries.db-wal")]
    assert not any(b"example.org" in file.read_bytes() for file in files)


SERVED = {"choices": [{"message": CHAT[1], "finish_reason": "stop", "stop_reason": None}]}


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, Any]:
    """What a service of this kind counts."""
    return {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens, "redraft": {}}


def served(**told: Any) -> dict[str, Any]:
    """A request with what a service answered."""
    return {"request": {"messages": CHAT[:1]}, "response": {**SERVED, **told}}


BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"text": "a"}, "with wrong fields", 'no column "messages"; there are: text'),
    ({"prompt_ids": [1], "completion_ids": []}, "with wrong fields", "completion_ids: wanted a list of whole numbers"),
    ({"prompt_ids": [1], "completion_ids": [True]}, "with wrong fields", "completion_ids: wanted a list of whole"),
    ({"prompt_ids": [1, 259], "completion_ids": [1]}, "with unknown tokens", r"prompt_ids\[1\] is 259, .* 0 to 258"),
    ({"prompt_ids": [-1], "completion_ids": [1]}, "with unknown tokens", r"prompt_ids\[0\] is -1"),
    ({"prompt_ids": [1], "completion_ids": [1], "finish_reason": "A b"}, "with wrong fields", "finish_reason is 'A b'"),
    ({"messages": CHAT[:1]}, "without an answer", "wanted a question, and last the assistant's answer"),
    ({"messages": "hi"}, "without an answer", "wanted a question, and last the assistant's answer"),
    ({"messages": [CHAT[0], {**CHAT[1], "weight": 0}]}, "of weight 0", "the answer is not to be learnt"),
    ({"messages": [CHAT[0], {**CHAT[1], "reasoning": "hm"}]}, "with reasoning in the answer", "tell its tokens"),
    (served(usage=usage(21, 4)), "with an answer of other tokens", "counted 4 tokens, the answer has 12"),
    (served(usage=usage(20, 12)), "rendered otherwise than served", "the prompt has 21 tokens here"),
    (served(prompt_token_ids=[1, 2]), "rendered otherwise than served", "the prompt has 21 tokens here"),
    (served(choices=[{"message": CHAT[1], "stop_reason": 300}]), "with unknown tokens", r"stop_reason\[0\] is 300"),
    ({"messages": [{"role": "bot", "content": "a"}, CHAT[1]]}, "with an unknown role", "\"role\" is 'bot'"),
    ({"prompt": "a\ud800", "completion": "b"}, "with wrong fields", "valid Unicode"),
    ({"prompt": "a", "completion": " "}, "without an answer", "wanted a question, and last the assistant's answer"),
    ({"prompt": "a", "completion": [{"role": "assistant", "content": " "}]}, "with wrong fields", "1: .*not blank"),
    ({"prompt": "a" * 256, "completion": "b"}, "too long", "wanted at most 256 tokens, the engine's context; got 277"),
    ({"messages": CHAT, "domain": "Chat!"}, "with an invalid domain", "domain is 'Chat!', wanted 1 to 32"),
    ({"messages": CHAT, "temperature": -1}, "with an invalid temperature", "temperature is -1, wanted .* from 0 on"),
    ({"messages": CHAT, "temperature": True}, "with an invalid temperature", "temperature is True"),
    ({"messages": CHAT, "group": "my group"}, "with an invalid group", "1 to 128 printable ASCII .*, got 8 characters"),
    ({"messages": CHAT, "subject": 7}, "with an invalid subject", "subject is a int, wanted a text"),
    ({"messages": CHAT, "temperature": 10**400}, "with wrong fields", "OverflowError: int too large"),
    ({"messages": CHAT, "subject": "a\ud800"}, "with wrong fields", "UnicodeEncodeError: .*surrogates not allowed"),
]


@pytest.mark.slow
def test_a_row_that_cannot_be_used_is_counted_with_its_reason_and_its_place(log: QueryLog, write: Write) -> None:
    waiting = BAD
    while waiting:  # of each reason the first place is told, so that one import has a row of each
        told = {reason: (row, fault) for row, reason, fault in reversed(waiting)}
        waiting = [bad for bad in waiting if told[bad[1]] != (bad[0], bad[2])]
        file = write({"messages": CHAT}, *(row for row, _ in told.values()))
        report = import_logs.fn([file], max_len=256)
        assert (report.num_added + report.num_repeated, report.skipped) == (1, dict.fromkeys(told, 1))
        for line, (reason, (_, fault)) in enumerate(told.items(), start=2):
            assert re.match(f"{file}, line {line}: .*{fault}", report.first[reason])
    assert log.stats().total == 1


def test_a_strict_import_adds_nothing_where_a_row_cannot_be_used(log: QueryLog, write: Write) -> None:
    file = write({"messages": CHAT}, {"messages": CHAT, "temperature": 10**400})
    with pytest.raises(ValueError, match="old.jsonl, line 2: OverflowError: int too large"):
        import_logs.fn([file], max_len=256, strict=True)
    assert log.stats().total == 0


SHOWN = (
    "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}<|endoftext|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
IM_END, ENDOFTEXT = TOKENIZER.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])


@pytest.fixture
def shown(log: QueryLog, tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, store: Path) -> QueryLog:
    """The log of a home whose target shows tools, and ends an answer by another token than its tokenizer does."""
    changed = shutil.copytree(tiny_target, tmp_path / "changed")
    (changed / "chat_template.jinja").write_text(SHOWN)
    settings = json.loads((changed / "generation_config.json").read_text())
    settings["eos_token_id"] = [IM_END, ENDOFTEXT]
    (changed / "generation_config.json").write_text(json.dumps(settings))
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("REDRAFT_HOME", str(with_champion(store, tmp_path / "home", changed)))
    return log


def test_each_end_of_the_target_ends_an_answer_and_the_templates_where_nothing_is_said(
    shown: QueryLog, write: Write
) -> None:
    def answered(**choice: Any) -> dict[str, Any]:
        choices = [{"message": CHAT[1], **choice}]
        asked = [{"role": "user", "content": str(choice)}]  # a row's content is its name
        return {"request": {"messages": asked, "stop": ["x"]}, "response": {"choices": choices}}

    said = encode("hello there")
    rows = {
        "chat": ({"messages": CHAT}, [*said, ENDOFTEXT], "stop"),
        "its_own": (answered(finish_reason="stop", stop_reason=None), [*said, IM_END], "stop"),
        "named": (answered(finish_reason="stop", stop_reason=ENDOFTEXT), [*said, ENDOFTEXT], "stop"),
        "cut": (answered(finish_reason="length", stop_reason=None), said, "length"),
        "perhaps_stopped": (answered(finish_reason="stop"), said, "stop"),
        "ids": ({"prompt_ids": [5], "completion_ids": [*said, ENDOFTEXT]}, [*said, ENDOFTEXT], "stop"),
        "ids_cut": ({"prompt_ids": [5], "completion_ids": said}, said, "length"),
    }
    report = import_logs.fn([write(*({**row, "domain": name} for name, (row, *_) in rows.items()))], max_len=256)
    assert not report.skipped, report.first
    found = {row.domain: (row.completion_ids, row.finish_reason) for row in shown.rows(1, 9)}
    assert found == {name: (ids, finish) for name, (_, ids, finish) in rows.items()}


@pytest.mark.parametrize(
    ("template", "stops", "end"),
    [
        (TOKENIZER.chat_template, {IM_END, ENDOFTEXT}, IM_END),
        (SHOWN, {IM_END, ENDOFTEXT}, ENDOFTEXT),
        (SHOWN, {IM_END}, IM_END),
        ("{% for m in messages %}{{ m.content }}\n{% endfor %}", {IM_END}, IM_END),
        ("{% for m in messages %}<|im_end|>{{ m.content }}\n{% endfor %}", {IM_END, ENDOFTEXT}, None),
        ("{{ raise_exception('no') }}", {IM_END, ENDOFTEXT}, None),
    ],
)
def test_the_end_of_an_answer_is_what_the_template_writes_after_one(
    template: str, stops: set[int], end: int | None
) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    assert template_end(ChatEncoder(tokenizer), frozenset(stops)) == end


def test_tools_and_calls_are_in_the_prompt_and_an_answer_that_calls_one_is_not_learnt(
    shown: QueryLog, write: Write
) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    called = [CHAT[0], {"role": "assistant", "content": "", "tool_calls": [call]}]
    tools = [{"type": "function", "function": {"name": "f"}}]
    chat = [*called, {"role": "tool", "content": "r", "tool_call_id": "1"}, CHAT[1]]
    report = import_logs.fn([write({"messages": chat, "tools": tools}, {"messages": called, "tools": tools})], 256)
    assert report.line() == "read 2, added 1, repeated 0, skipped 1: 1 with tool calls in the answer"
    (row,) = shown.rows(1, 9)
    tool = '{"type": "function", "function": {"name": "f", "description": null, "parameters": null}}'
    turns = (
        '<|im_start|>assistant\n{"arguments": {"x": 1}, "name": "f"}<|endoftext|>\n<|im_start|>tool\nr<|endoftext|>\n'
    )
    assert row.prompt == f"{tool}<|im_start|>user\nhi<|endoftext|>\n{turns}<|im_start|>assistant\n"
    assert row.prompt_ids == encode(row.prompt)


def test_token_ids_that_the_service_told_are_taken_where_its_prompt_is_the_same(shown: QueryLog, write: Write) -> None:
    ids = {"token_ids": [7, 8, IM_END], "finish_reason": "tool_calls"}
    call = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
    choice = {"message": {"role": "assistant", "content": None, "tool_calls": [call]}, **ids}
    asked = {"request": {"messages": CHAT[:1]}}
    prompt_ids = encode("<|im_start|>user\nhi<|endoftext|>\n<|im_start|>assistant\n")
    same = {**asked, "response": {"choices": [choice], "prompt_token_ids": prompt_ids}}
    other = {**asked, "response": {"choices": [choice], "prompt_token_ids": prompt_ids[1:]}}
    untold = {**asked, "response": {"choices": [choice]}}
    report = import_logs.fn([write(same, other, untold)], max_len=256)
    assert report.skipped == {"rendered otherwise than served": 1, "with tool calls in the answer": 1}
    (row,) = shown.rows(1, 9)
    assert (row.prompt_ids, row.completion_ids, row.finish_reason) == (prompt_ids, ids["token_ids"], "stop")


def test_the_two_files_of_a_batch_are_one_import(log: QueryLog, write: Write) -> None:
    asked = [{"custom_id": f"r{i}", "body": {"messages": [{"role": "user", "content": f"q{i}"}]}} for i in range(3)]
    replies = [{"custom_id": f"r{i}", "response": {"status_code": 200, "body": SERVED}, "error": None} for i in (1, 0)]
    failed = {"custom_id": "r2", "response": {"status_code": 400, "body": {"error": {}}}, "error": None}
    files = [write(*asked, name="input.jsonl"), write(*replies, failed, name="output.jsonl")]
    report = import_logs.fn(files, max_len=256)
    assert report.line() == "read 3, added 2, repeated 0, skipped 1: 1 that failed"
    assert report.first["that failed"].startswith(f"{files[1]}, line 3: ")
    assert sorted(str(row.prompt).split("\n")[1] for row in log.rows(1, 9)) == ["q0<|im_end|>", "q1<|im_end|>"]


@pytest.mark.slow
def test_the_target_answers_prompts_alone_and_is_not_asked_again(log: QueryLog, write: Write) -> None:
    recipe = load_recipe("tiny")
    engine = catalog.parse("engines", {"name": "torch", "max_model_len": 256})
    short = recipe.generate.model_copy(update={"max_tokens": 6, "concurrency": 2})
    answering = recipe.model_copy(update={"engine": engine, "generate": short})
    called = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}
    weightless = {**CHAT[1], "weight": 0}
    rows = [{"prompt": "one", "temperature": 0, "domain": "code"}, {"messages": CHAT}, {"messages": [CHAT[0], called]}]
    file = write(*rows, {"messages": [CHAT[0], weightless]}, {"prompt": "b" * 240})
    report = import_logs.fn([file], 256, answering=answering)
    assert report.line() == "read 5, added 3, repeated 0, skipped 2: 1 of weight 0, 1 too long"
    own, given = log.rows(1, 9)[1], log.rows(1, 9)[0]
    assert given.completion == "hello there<|im_end|>"
    assert (own.domain, own.sampling, own.consent) == ("code", {"temperature": 0.0}, "full")
    assert own.prompt == "<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\n"
    assert 1 <= len(own.completion_ids) <= 6
    assert own.finish_reason == ("length" if len(own.completion_ids) == 6 else "stop")
    again = import_logs.fn([file], 256, answering=answering)
    assert (again.num_added, again.num_repeated) == (0, 3)


def test_a_line_that_is_no_json_is_skipped_and_counted(log: QueryLog, write: Write) -> None:
    file = write({"messages": CHAT})
    file.write_text(file.read_text() + "{\n[]\n")
    assert import_logs.fn([file], max_len=256).line() == "read 3, added 1, repeated 0, skipped 2: 2 unreadable"


def test_a_domain_for_all_rows_is_checked_first(log: QueryLog, write: Write) -> None:
    with pytest.raises(ValueError, match="domain is 'No Domain'"):
        import_logs.fn([write({"messages": CHAT})], max_len=256, domain="No Domain")
