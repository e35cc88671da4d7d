"""From messages and documents to token ids, and from ids to others with a changed text.

The chat template writes its markers as text, so a user who types a marker could close their own turn. The template is
rendered with a private stand-in for each message's content, and the contents are encoded apart, with special tokens
off.
"""

import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import TemplateError
from tokenizers import Tokenizer


def encode_chat(tokenizer: Any, messages: Sequence[Mapping[str, str]]) -> list[int]:
    """Encode a chat up to the point where the assistant answers.

    Args:
        tokenizer: a Hugging Face tokenizer with a chat template.
        messages: {"role", "content"} each; the last one is not the assistant's.

    Raises:
        ValueError: there are no messages, or the template drops one of them or refuses their order.
    """
    return _encode(tokenizer, messages, add_generation_prompt=True)


def encode_document(tokenizer: Any, content: str | Sequence[Mapping[str, str]]) -> list[int]:
    """Encode something to train on: a text and the end-of-text token, or a whole chat as the template writes it.

    Args:
        tokenizer: a Hugging Face tokenizer, with a chat template where a chat comes.
        content: a text, or messages of {"role", "content"}.

    Raises:
        ValueError: as `encode_chat`, or the tokenizer has no end-of-text token.
    """
    if not isinstance(content, str):
        return _encode(tokenizer, content, add_generation_prompt=False)
    if tokenizer.eos_token_id is None:
        raise ValueError("the tokenizer has no end-of-text token, so a text could not end")
    return [*tokenizer.encode(content, add_special_tokens=False, split_special_tokens=True), tokenizer.eos_token_id]


def _encode(tokenizer: Any, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool) -> list[int]:
    if not messages:
        raise ValueError("messages are empty; at least one was wanted")
    marks = [f"\ue000{secrets.token_hex(8)}\ue001" for _ in messages]
    masked = [{"role": m["role"], "content": mark} for m, mark in zip(messages, marks, strict=True)]
    try:
        rest = tokenizer.apply_chat_template(masked, add_generation_prompt=add_generation_prompt, tokenize=False)
    except TemplateError as error:
        raise ValueError(f"the chat template refuses the messages: {error}") from error
    ids: list[int] = []
    for message, mark in zip(messages, marks, strict=True):
        head, found, rest = rest.partition(mark)
        if not found:
            raise ValueError(f"the chat template leaves out a message of role {message['role']!r}")
        ids += tokenizer.encode(head, add_special_tokens=False)
        ids += tokenizer.encode(message["content"], add_special_tokens=False, split_special_tokens=True)
    ids += tokenizer.encode(rest, add_special_tokens=False)
    return ids


def rewrite(tokenizer: Any, token_ids: Sequence[int], change: Callable[[str], str]) -> tuple[list[int], str]:
    """Change the text of a token sequence in the stretches between special tokens.

    Only a stretch that changed is encoded again, with special tokens off: a marker that a user typed stays text.

    Args:
        tokenizer: a Hugging Face tokenizer.
        token_ids: prompt or completion.
        change: text to text.

    Returns:
        The ids and their text, special tokens included; equal to what came where nothing changed.
    """
    special = set(tokenizer.all_special_ids)
    ids: list[int] = []
    texts: list[str] = []
    for is_special, group in groupby(token_ids, key=special.__contains__):
        stretch = list(group)
        text = tokenizer.decode(stretch, clean_up_tokenization_spaces=False)
        changed = text if is_special else change(text)
        if changed != text:
            stretch = tokenizer.encode(changed, add_special_tokens=False, split_special_tokens=True)
        ids += stretch
        texts.append(changed)
    return ids, "".join(texts)


def differing_tokens(directory: Path, like: Path) -> list[str]:
    """Return the tokens that don't have one id in the tokenizers of two model directories, sorted.

    Raises:
        ValueError: one of them has no tokenizer.json.
    """
    for one in (directory, like):
        if not (one / "tokenizer.json").is_file():
            raise ValueError(f"{one.name} has no tokenizer.json, so its vocabulary can't be compared")
    own, wanted = (Tokenizer.from_file(str(one / "tokenizer.json")).get_vocab() for one in (directory, like))
    return sorted(token for token in own.keys() | wanted.keys() if own.get(token) != wanted.get(token))


class TurnMarks(NamedTuple):
    """The tokens that a chat template writes before and after what a user says; empty where nothing is marked."""

    before: list[int]
    after: list[int]


def turn_marks(tokenizer: Any) -> TurnMarks:
    """Find the marks of a tokenizer's chat template, those that stand around a first turn and a later one alike.

    Without a template there are none, nor where it refuses a chat of three turns.
    """
    if tokenizer.chat_template is None:
        return TurnMarks([], [])
    first, answer, second = (f"\ue000{secrets.token_hex(8)}\ue001" for _ in range(3))
    turns = (("user", first), ("assistant", answer), ("user", second))
    messages = [{"role": role, "content": mark} for role, mark in turns]
    try:
        rest = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    except TemplateError:
        return TurnMarks([], [])
    pieces = []
    for mark in (first, answer, second):
        piece, _, rest = rest.partition(mark)
        pieces.append(piece)
    head, after_user, after_answer, tail = *pieces, rest
    before = os.path.commonprefix([head[::-1], after_answer[::-1]])[::-1]
    special = set(tokenizer.all_special_ids)
    ids = tokenizer.encode(before, add_special_tokens=False)
    start = next((place for place, token in enumerate(ids) if token in special), 0)  # a shared end may cut a token
    after = tokenizer.encode(os.path.commonprefix([after_user, tail]), add_special_tokens=False)
    return TurnMarks(ids[start:], after[:1] if after and after[0] in special else after)


def first_turn(prompt_ids: Sequence[int], marks: TurnMarks) -> list[int]:
    """Return what the user said first, without system prompt and template; of a prompt without the marks, all of it."""
    prompt = list(prompt_ids)
    start = _find(prompt, marks.before, 0) if marks.before else None
    if start is None:
        return prompt
    start += len(marks.before)
    end = _find(prompt, marks.after, start) if marks.after else None
    return prompt[start:end] or prompt


def _find(ids: list[int], wanted: list[int], start: int) -> int | None:
    places = range(start, len(ids) - len(wanted) + 1)
    return next((place for place in places if ids[place : place + len(wanted)] == wanted), None)
