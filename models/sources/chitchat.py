"""BYU's chitchat corpus: people talking to people, out of the PyPI package `chitchat-dataset`.

The file is found without importing the package, whose import parses all of it. Whoever speaks first becomes the user
and the other person the assistant, so the assistant's turns are a person's and not the target's.
"""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from models.params import BaseParams
from models.sources import Message, Prompt, unique

_PACKAGE = "chitchat-dataset==0.9.0"


class Params(BaseParams):
    """Which conversations become prompts, and how much of each."""

    name: Literal["chitchat"] = "chitchat"
    num_user_turns: int = Field(2, ge=1, description="at most this many user turns, from the conversation's start")
    min_chars: int = Field(16, ge=1, description="in the last user turn; shorter ones are mostly bare greetings")
    max_chars: int = Field(1200, ge=1, description="in all turns together; longer ones are pasted floods")


def prompts(params: Params) -> list[Prompt]:
    """Return one prompt a conversation; conversations that are too short, too long or hold a link are left out.

    Raises:
        ValueError: the package is not installed.
    """
    conversations = json.loads(_dataset_file().read_text(encoding="utf-8"))
    found = (_prompt(f"chitchat:{key}", value["messages"], params) for key, value in conversations.items())
    return unique(prompt for prompt in found if prompt is not None)


def _dataset_file() -> Path:
    spec = find_spec("chitchat_dataset")
    if spec is None or spec.origin is None:
        raise ValueError(f"the source chitchat needs a package: pip install {_PACKAGE}")
    return Path(spec.origin).with_name("dataset.json")


def _prompt(group: str, turns: list[list[dict[str, Any]]], params: Params) -> Prompt | None:
    # A turn is a run of one person's lines; an even number of turns would end on the assistant.
    num_turns = min(len(turns), 2 * params.num_user_turns - 1)
    num_turns -= num_turns % 2 == 0
    texts = ["\n".join(line["text"].strip() for line in turn).strip() for turn in turns[:num_turns]]
    if not texts or not all(texts) or len(texts[-1]) < params.min_chars or sum(map(len, texts)) > params.max_chars:
        return None
    if any("http" in text or "www." in text for text in texts):
        return None
    messages = (Message(role="assistant" if i % 2 else "user", content=text) for i, text in enumerate(texts))
    return Prompt(messages=tuple(messages), domain="chat", group=group)
