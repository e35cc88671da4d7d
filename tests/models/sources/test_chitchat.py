import importlib.util
from collections.abc import Callable

import pytest

from models.sources import Message, Prompt
from models.sources.chitchat import Params, _document, _prompt, prompts


def turn(*lines: str) -> list[dict[str, str]]:
    return [{"text": line, "sender": "a", "timestamp": "2018-05-02T19:38:15Z"} for line in lines]


def test_turns_alternate_and_end_on_the_user() -> None:
    turns = [turn("Hello", "How are you doing today?"), turn("fine"), turn("I just took a nap."), turn("oh wow")]
    prompt = _prompt("chitchat:1", turns, Params(num_user_turns=4))
    assert prompt.messages == (
        Message(role="user", content="Hello\nHow are you doing today?"),
        Message(role="assistant", content="fine"),
        Message(role="user", content="I just took a nap."),
    )
    assert (prompt.domain, prompt.group) == ("chat", "chitchat:1")


def test_num_user_turns_limits_the_prompt() -> None:
    turns = [turn("What did you do yesterday?"), turn("sleep"), turn("And what else did you do?")]
    assert len(_prompt("chitchat:1", turns, Params(num_user_turns=1)).messages) == 1


@pytest.mark.parametrize(
    "turns",
    [
        [],
        [turn("hello?")],
        [turn(" "), turn("hi"), turn("is there anyone in here?")],
        [turn("see http://example.org for more of this")],
        [turn("see www.example.org for more of this")],
        [turn("x" * 1201)],
    ],
    ids=["empty", "short", "blank turn", "link", "bare link", "flood"],
)
def test_a_conversation_without_a_usable_prompt_is_left_out(turns: list) -> None:
    assert _prompt("chitchat:1", turns, Params()) is None


def test_a_document_is_a_whole_chat_that_ends_after_a_turn() -> None:
    turns = [turn("Hello there"), turn("hi"), turn("How was your day?"), turn("fine"), turn("x" * 50)]
    whole = _document("chitchat:1", turns, Params())
    assert [message.role for message in whole.content] == ["user", "assistant", "user", "assistant", "user"]
    cut = _document("chitchat:1", turns, Params(max_document_chars=40))
    assert cut.content == whole.content[:4]
    assert _document("chitchat:1", turns[:3], Params()) is None
    assert _document("chitchat:1", [*turns, turn("see www.example.org")], Params()) is None


@pytest.mark.slow
def test_the_corpus_gives_thousands_of_prompts(default_stream: Callable[[str], list[Prompt]]) -> None:
    found = default_stream("chitchat")
    assert len(found) > 5000
    assert {len(prompt.messages) for prompt in found} == {1, 3}


def test_a_missing_package_is_refused_with_the_command_that_adds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.path", [])
    importlib.invalidate_caches()
    with pytest.raises(ValueError, match="pip install chitchat-dataset==0.9.0"):
        prompts(Params())
