"""BYU's chitchat corpus: people talking to people, out of the PyPI package `chitchat-dataset`.

The file is found without importing the package, whose import parses all of it. Whoever speaks first becomes the user
and the other person the assistant, so the assistant's turns are a person's and not the target's.
"""

import json
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from models.params import BaseParams
from models.sources import Document, Message, Prompt, unique

_PACKAGE = "chitchat-dataset==0.9.0"


class Params(BaseParams):
    """Which conversations become prompts or documents, and how much of each."""

    name: Literal["chitchat"] = "chitchat"
    num_user_turns: int = Field(2, ge=1, description="at most this many user turns, from the conversation's start")
    min_chars: int = Field(16, ge=1, description="in the last user turn; shorter ones are mostly bare greetings")
    max_chars: int = Field(1200, ge=1, description="in all turns of a prompt; longer ones are pasted floods")
    min_turns: int = Field(4, ge=1, description="in a document, of both persons")
    max_document_chars: int = Field(4000, ge=1, description="where a document ends, after a whole turn")


def prompts(params: Params) -> list[Prompt]:
    """Return one prompt a conversation; conversations that are too short, too long or hold a link are left out.
    ValueError if the package is not installed."""
    found = (_prompt(group, turns, params) for group, turns in _conversations())
    return unique(prompt for prompt in found if prompt is not None)


def documents(params: Params) -> list[Document]:
    """Return one chat a conversation, from its start; those that are too short or hold a link are left out. ValueError
    if the package is not installed."""
    found = (_document(group, turns, params) for group, turns in _conversations())
    return unique(document for document in found if document is not None)


def _conversations() -> Iterator[tuple[str, list[list[dict[str, Any]]]]]:
    """Yield group and turns; a turn is a run of one person's lines."""
    conversations = json.loads(_dataset_file().read_text(encoding="utf-8"))
    return ((f"chitchat:{key}", value["messages"]) for key, value in conversations.items())


def _dataset_file() -> Path:
    spec = find_spec("chitchat_dataset")
    if spec is None or spec.origin is None:
        raise ValueError(f"the source chitchat needs a package: pip install {_PACKAGE}")
    return Path(spec.origin).with_name("dataset.json")


def _prompt(group: str, turns: list[list[dict[str, Any]]], params: Params) -> Prompt | None:
    # An even number of turns would end on the assistant.
    num_turns = min(len(turns), 2 * params.num_user_turns - 1)
    num_turns -= num_turns % 2 == 0
    messages = _messages(turns[:num_turns])
    if not messages or len(messages[-1].content) < params.min_chars:
        return None
    if sum(len(message.content) for message in messages) > params.max_chars:
        return None
    return Prompt(messages=messages, domain="chat", group=group)


def _document(group: str, turns: list[list[dict[str, Any]]], params: Params) -> Document | None:
    messages = _messages(turns)
    ends = list(accumulate(len(message.content) for message in messages))
    messages = messages[: sum(end <= params.max_document_chars for end in ends)]
    if len(messages) < params.min_turns:
        return None
    return Document(content=messages, domain="chat", group=group)


def _messages(turns: list[list[dict[str, Any]]]) -> tuple[Message, ...]:
    """Return the turns as messages, none at all where a turn is empty or holds a link."""
    texts = ["\n".join(line["text"].strip() for line in turn).strip() for turn in turns]
    if not all(texts) or any("http" in text or "www." in text for text in texts):
        return ()
    return tuple(Message(role="assistant" if i % 2 else "user", content=text) for i, text in enumerate(texts))
