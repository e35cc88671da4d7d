"""Streams of prompts and of documents, and what they share: rows to prompts, splitting and sampling.

Each file has `prompts(params)`, chats that wait for the target's answer, and `documents(params)`, texts and whole chats
that language models are trained on. A prompt and the document that holds it have one group.

Splitting goes by `group`, not by prompt, so near-copies (two functions of one package, two cuts of one conversation)
never sit on both sides. It hashes each group by itself: as data is added, no group changes sides.
"""

import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar, get_args

from pydantic import Field, model_validator

from models.params import Frozen

Role = Literal["system", "user", "assistant", "tool"]
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")  # JSON can spell it, UTF-8 can't


class Message(Frozen):
    """One turn of a chat."""

    role: Role
    content: str


class Prompt(Frozen):
    """A chat that waits for the target's answer.

    Attributes:
        messages: at least one, the last one is not the assistant's.
        domain: kind of traffic, such as "chat" or "code".
        group: what must stay on one side of a split.
    """

    messages: tuple[Message, ...] = Field(min_length=1)
    domain: str = Field(min_length=1)
    group: str = Field(min_length=1)

    @model_validator(mode="after")
    def _awaits_an_answer(self) -> "Prompt":
        if self.messages[-1].role == "assistant":
            raise ValueError("a prompt can't end with the assistant's message")
        return self

    @property
    def id(self) -> str:
        """sha256 of the messages, 64 hex digits; neither domain nor group changes it."""
        content = [[message.role, message.content] for message in self.messages]
        return digest(json.dumps(content, ensure_ascii=True))


class Document(Frozen):
    """Something to train a language model on.

    Attributes:
        content: a text, or a chat from its start.
        domain: kind of traffic, such as "chat" or "code".
        group: what must stay on one side of a split.
    """

    content: Annotated[str, Field(min_length=1)] | Annotated[tuple[Message, ...], Field(min_length=1)]
    domain: str = Field(min_length=1)
    group: str = Field(min_length=1)

    @property
    def id(self) -> str:
        """sha256 of the content, 64 hex digits; neither domain nor group changes it."""
        content = self.content
        listed = content if isinstance(content, str) else [[message.role, message.content] for message in content]
        return digest(json.dumps(listed, ensure_ascii=True))


ItemT = TypeVar("ItemT", Prompt, Document)
PartT = TypeVar("PartT", bound=str)


def prompt_from_row(row: Mapping[str, Any], column: str, domain: str, group: str, where: str) -> Prompt:
    """Map a row of a data set to a prompt.

    Args:
        row: column to value.
        column: holds a text (one user message) or a chat in OpenAI's shape. Assistant messages at the chat's end are
            left out: the answer is the target's to give.
        domain: domain of the prompt; "" reads the row's column `domain`.
        group: group of the prompt.
        where: file and line, the start of each error.

    Raises:
        ValueError: a column is missing or of another shape; names place and field.
    """
    domain = _domain_of(row, column, domain, where)
    where = f'{where}: column "{column}"'
    messages = parse_chat(row[column], where)
    while messages and messages[-1].role == "assistant":
        messages.pop()
    if not messages:
        raise ValueError(f"{where}: no message before the assistant's")
    return Prompt(messages=tuple(messages), domain=domain, group=group)


def document_from_row(row: Mapping[str, Any], column: str, domain: str, group: str, where: str) -> Document:
    """Map a row of a data set to a document: a text as it is, or a whole chat; see `prompt_from_row`."""
    domain = _domain_of(row, column, domain, where)
    where = f'{where}: column "{column}"'
    messages = parse_chat(row[column], where)  # a text becomes one message, and is checked on the way
    if not messages:
        raise ValueError(f"{where}: the chat has no message")
    content = row[column] if isinstance(row[column], str) else tuple(messages)
    return Document(content=content, domain=domain, group=group)


def _domain_of(row: Mapping[str, Any], column: str, domain: str, where: str) -> str:
    if column not in row:
        raise ValueError(f'{where}: no column "{column}"; there are: {", ".join(map(str, row)) or "none"}')
    domain = domain or row.get("domain") or ""
    if not isinstance(domain, str) or not domain:
        raise ValueError(f'{where}: set the parameter "domain", or give the row a column "domain" of text')
    return domain


def parse_chat(value: object, where: str) -> list[Message]:
    """Parse a chat in OpenAI's shape, or a text, which is one user message.

    Raises:
        ValueError: it is neither, or a message has no known role or no text; names `where` and the message.
    """
    if isinstance(value, str):
        value = [{"role": "user", "content": value}]
    if not isinstance(value, list):
        raise ValueError(f"{where}: wanted a text or a list of messages, got {type(value).__name__}")
    return [_message(item, f"{where}, message {index}") for index, item in enumerate(value)]


def _message(value: object, where: str) -> Message:
    if not isinstance(value, dict):
        raise ValueError(f"{where}: wanted an object with role and content, got {type(value).__name__}")
    role, content = value.get("role"), value.get("content")
    if role not in get_args(Role):
        raise ValueError(f'{where}: "role" is {role!r}, wanted one of {", ".join(get_args(Role))}')
    if not isinstance(content, str) or not content.strip() or _LONE_SURROGATE.search(content):
        raise ValueError(f'{where}: "content" is {content!r}, wanted a text that is not blank and is valid Unicode')
    return Message(role=role, content=content)


def unique(items: Iterable[ItemT]) -> list[ItemT]:
    """Return items in their order without exact copies, which could otherwise sit on both sides of a split."""
    found: dict[str, ItemT] = {}
    for item in items:
        found.setdefault(item.id, item)
    return list(found.values())


def split(items: Sequence[ItemT], fractions: Mapping[str, float], seed: int) -> dict[str, list[ItemT]]:
    """Split by a hash of each item's group.

    Args:
        items: prompts or documents, kept in their order within each part.
        fractions: part to its share of the groups, above 0 and summing to 1.
        seed: another seed gives another split.

    Returns:
        Part to items. Shares hold on average: a part's size varies as its groups do.

    Raises:
        ValueError: the shares are wrong, or a part got no item, as happens with few groups.
    """
    if not fractions or min(fractions.values()) <= 0 or not math.isclose(sum(fractions.values()), 1):
        raise ValueError(f"fractions must be above 0 and sum to 1, got {dict(fractions)}")
    parts: dict[str, list[ItemT]] = {part: [] for part in fractions}
    for item in items:
        parts[_part(int(digest(f"{seed}:{item.group}"), 16) / 2**256, fractions)].append(item)
    for part, members in parts.items():
        if not members:
            num_groups = len({item.group for item in items})
            raise ValueError(f'part "{part}" of the split is empty: {len(items)} items in {num_groups} groups')
    return parts


def _part(point: float, fractions: Mapping[str, float]) -> str:
    for part, share in fractions.items():
        point -= share
        if point < 0:
            return part
    return list(fractions)[-1]  # rounding can leave `point` at 0 past the last share


def sample(items: Sequence[ItemT], count: int, seed: int) -> list[ItemT]:
    """Draw `count` items without replacement, in random order; the order of `items` makes no difference.

    Raises:
        ValueError: `count` is below 0 or above the number of items.
    """
    if not 0 <= count <= len(items):
        raise ValueError(f"count must be from 0 to {len(items)}, the number of items; got {count}")
    return sorted(items, key=lambda item: digest(f"{seed}:{item.id}"))[:count]


def draw_parts(items: Sequence[ItemT], sizes: Mapping[PartT, int], domain: str, seed: int) -> dict[PartT, list[ItemT]]:
    """Draw each part's items out of groups of its own, and give them the recipe's name of their domain.

    Args:
        items: prompts or documents.
        sizes: part to its number of items.
        domain: the name.
        seed: another seed draws others.

    Raises:
        ValueError: there are too few items.
    """
    parts = split(items, {part: size / sum(sizes.values()) for part, size in sizes.items()}, seed)
    for part, size in sizes.items():
        if len(parts[part]) < size:
            kind = f"{type(items[0]).__name__.lower()}s"
            raise ValueError(f'domain "{domain}" has {len(parts[part])} {kind} for {part}, the recipe wants {size}')
    return {
        part: [item.model_copy(update={"domain": domain}) for item in sample(parts[part], size, seed)]
        for part, size in sizes.items()
    }


def digest(text: str) -> str:
    """Return the sha256 of a text, 64 hex digits."""
    return hashlib.sha256(text.encode()).hexdigest()
