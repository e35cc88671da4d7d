"""Streams of prompts and of documents, and what they share: splitting and sampling.

Each file has `prompts(params)`, chats that wait for the target's answer, and `documents(params)`, texts and whole chats
that language models are trained on. A prompt and the document that holds it have one group.

Splitting goes by `group`, not by prompt, so near-copies (two functions of one package, two cuts of one conversation)
never sit on both sides. It hashes each group by itself: as data is added, no group changes sides.
"""

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from pydantic import Field, JsonValue, model_validator

from models.params import BaseParams
from models.rowfiles import Unusable, usable
from models.types import Frozen

if TYPE_CHECKING:
    from models.chats import ChatEncoder

Role = Literal["system", "developer", "user", "assistant", "tool", "function"]


class Message(Frozen):
    """One turn of a chat, with what the service reads of it, as in OpenAI's API; what is empty was not given."""

    role: Role
    content: str | tuple[str, ...] = ""
    name: str | None = None
    tool_calls: tuple[dict[str, JsonValue], ...] = ()
    tool_call_id: str | None = None
    reasoning: str | None = None

    @property
    def texts(self) -> tuple[str, ...]:
        return (self.content,) if isinstance(self.content, str) else self.content

    def as_openai(self) -> dict[str, Any]:
        content = self.content
        parts = content if isinstance(content, str) else [{"type": "text", "text": text} for text in content]
        rest = self.model_dump(exclude={"role", "content"}, exclude_defaults=True)
        return {"role": self.role, "content": parts, **rest}


class _Chat(Frozen):
    """What a chat has beside its messages: OpenAI's tools, what else the chat template is given, the kind of traffic,
    such as "chat" or "code", and the group that must stay on one side of a split."""

    tools: tuple[dict[str, JsonValue], ...] = ()
    template_arguments: dict[str, JsonValue] = Field(default_factory=dict)
    domain: str = Field(min_length=1)
    group: str = Field(min_length=1)

    def _digest(self, content: str | Sequence[Message]) -> str:
        """Return the sha256 of what is said; neither domain nor group changes it."""
        said: Any = content
        if not isinstance(content, str):
            plain = {"role", "content"}
            openai = [message.as_openai() for message in content]
            said = [[one["role"], one["content"]] if one.keys() == plain else one for one in openai]
        if self.tools or self.template_arguments:
            said = [said, self.tools, self.template_arguments]
        return digest(json.dumps(said, ensure_ascii=True))


class Prompt(_Chat):
    """A chat that waits for the target's answer."""

    messages: tuple[Message, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _awaits_an_answer(self) -> "Prompt":
        if self.messages[-1].role == "assistant":
            raise ValueError("a prompt can't end with the assistant's message")
        return self

    @property
    def id(self) -> str:
        """sha256 of the chat, 64 hex digits; neither domain nor group changes it."""
        return self._digest(self.messages)

    def fields(self) -> dict[str, Any]:
        """Return what a request has beside the messages, as the service takes it."""
        fields = {"tools": list(self.tools), "chat_template_kwargs": self.template_arguments}
        return {name: value for name, value in fields.items() if value}

    def encode(self, encoder: "ChatEncoder") -> list[int]:
        """Return its token ids, as they are served; ValueError if the chat template refuses it."""
        messages = [message.as_openai() for message in self.messages]
        return encoder.encode(messages, self.tools or None, template_arguments=self.template_arguments)


class Document(_Chat):
    """Something to train a language model on: a text, or a chat from its start."""

    content: Annotated[str, Field(min_length=1)] | Annotated[tuple[Message, ...], Field(min_length=1)]

    @property
    def id(self) -> str:
        """sha256 of the content, 64 hex digits; neither domain nor group changes it."""
        return self._digest(self.content)

    def encode(self, encoder: "ChatEncoder") -> list[int]:
        """Return its token ids: a text and the end-of-text token, or a whole chat as the template writes it; ValueError
        if the chat template refuses it, or the tokenizer has no end-of-text token."""
        if isinstance(self.content, str):
            return encoder.encode_document(self.content)
        messages = [message.as_openai() for message in self.content]
        tools, arguments = self.tools or None, self.template_arguments
        return encoder.encode(messages, tools, add_generation_prompt=False, template_arguments=arguments)


ItemT = TypeVar("ItemT", Prompt, Document)
PartT = TypeVar("PartT", bound=str)


def encoded(
    items: Iterable[ItemT], encoder: "ChatEncoder", max_len: int | None = None
) -> list[tuple[ItemT, list[int]]]:
    """Return items with their token ids, without those that a target can't read, which are logged. `max_len` is more
    tokens than a prompt may have; None for any. ValueError if the target can read none."""

    def item(_: str, one: ItemT) -> tuple[ItemT, list[int]]:
        try:
            ids = one.encode(encoder)
        except ValueError as error:
            raise Unusable("that the chat template refuses", str(error)) from error
        if max_len is not None and len(ids) >= max_len:
            raise Unusable("too long", f"wanted less than {max_len} tokens, the engine's context; got {len(ids)}")
        return one, ids

    return list(usable("prompts", lambda _: ((one.group, one) for one in items), item))


def named(source: BaseParams, domain: str) -> BaseParams:
    """Return a source's settings; one that reads each row's domain and is under a recipe's name reads that instead, and
    leaves out rows that name another."""
    if getattr(source, "domain", None) != "":
        return source
    told = {"domain": domain} | ({"only": domain} if getattr(source, "only", None) == "" else {})
    return source.model_copy(update=told)


def unique(items: Iterable[ItemT]) -> list[ItemT]:
    """Return items in their order without exact copies, which could otherwise sit on both sides of a split."""
    found: dict[str, ItemT] = {}
    for item in items:
        found.setdefault(item.id, item)
    return list(found.values())


def split(items: Sequence[ItemT], fractions: Mapping[str, float], seed: int) -> dict[str, list[ItemT]]:
    """Split by a hash of each item's group and the seed, keeping the order of items within each part.

    Fractions are of the groups, above 0 and summing to 1. They hold on average: a part's size varies as its groups do.
    ValueError if the shares are wrong, or a part got no item, as happens with few groups.
    """
    if not fractions or min(fractions.values()) <= 0 or not math.isclose(sum(fractions.values()), 1):
        raise ValueError(f"fractions must be above 0 and sum to 1, got {dict(fractions)}")
    parts = _split(items, fractions, seed)
    for part, members in parts.items():
        if not members:
            num_groups = len({item.group for item in items})
            raise ValueError(f'part "{part}" of the split is empty: {len(items)} items in {num_groups} groups')
    return parts


def _split(items: Sequence[ItemT], fractions: Mapping[PartT, float], seed: int) -> dict[PartT, list[ItemT]]:
    parts: dict[PartT, list[ItemT]] = {part: [] for part in fractions}
    for item in items:
        parts[_part(int(digest(f"{seed}:{item.group}"), 16) / 2**256, fractions)].append(item)
    return parts


def _in_proportion(sizes: Mapping[PartT, int]) -> dict[PartT, float]:
    return {part: size / sum(sizes.values()) for part, size in sizes.items()}


def _part(point: float, fractions: Mapping[PartT, float]) -> PartT:
    for part, share in fractions.items():
        point -= share
        if point < 0:
            return part
    return list(fractions)[-1]  # rounding can leave `point` at 0 past the last share


def sample(items: Sequence[ItemT], count: int, seed: int) -> list[ItemT]:
    """Draw `count` items without replacement, in random order; the order of `items` makes no difference. ValueError if
    `count` is below 0 or above the number of items."""
    if not 0 <= count <= len(items):
        raise ValueError(f"count must be from 0 to {len(items)}, the number of items; got {count}")
    return sorted(items, key=lambda item: digest(f"{seed}:{item.id}"))[:count]


def draw_parts(items: Sequence[ItemT], sizes: Mapping[PartT, int], domain: str, seed: int) -> dict[PartT, list[ItemT]]:
    """Draw each part's items out of groups of its own, and give them the recipe's name of their domain; ValueError if
    a part is too small, with all sizes as they are, and those that fit."""
    if not items:
        raise ValueError(f'domain "{domain}": its source has nothing')
    parts = _split(items, _in_proportion(sizes), seed)
    if any(len(parts[part]) < size for part, size in sizes.items()):
        kind, num_groups = f"{type(items[0]).__name__.lower()}s", len({item.group for item in items})
        found = ", ".join(f"{part} {len(parts[part])} ({size} wanted)" for part, size in sizes.items())
        fit = ", ".join(f"num_{part} = {size}" for part, size in _fitting(items, sizes, seed).items())
        raise ValueError(
            f'domain "{domain}" has {len(items)} {kind} in {num_groups} groups, none of which is divided; they split '
            f"into {found}. {f'These fit: {fit}' if fit else 'No numbers fit so few groups'}"
        )
    return {
        part: [item.model_copy(update={"domain": domain}) for item in sample(parts[part], size, seed)]
        for part, size in sizes.items()
    }


def _fitting(items: Sequence[ItemT], sizes: Mapping[PartT, int], seed: int) -> dict[PartT, int]:
    """Return the sizes, the largest cut to one level, that there are items for; none where that is at no level."""
    lowest, highest = 0, max(sizes.values())
    while lowest < highest:
        level = (lowest + highest + 1) // 2
        cut = {part: min(size, level) for part, size in sizes.items()}
        parts = _split(items, _in_proportion(cut), seed)
        if all(len(parts[part]) >= size for part, size in cut.items()):
            lowest = level
        else:
            highest = level - 1
    return {part: min(size, lowest) for part, size in sizes.items()} if lowest else {}


def digest(text: str) -> str:
    """Return the sha256 of a text, 64 hex digits."""
    return hashlib.sha256(text.encode()).hexdigest()
