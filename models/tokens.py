"""What tokens tell of the texts that they were made of. Chats and texts are encoded in `models.chats`."""

import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import TemplateError
from tokenizers import Tokenizer


def differing_tokens(directory: Path, like: Path) -> list[str]:
    """Return the tokens without one id in both model directories, sorted; ValueError if one has no tokenizer.json."""
    for one in (directory, like):
        if not (one / "tokenizer.json").is_file():
            raise ValueError(f"{one.name} has no tokenizer.json, so its vocabulary can't be compared")
    own, wanted = (Tokenizer.from_file(str(one / "tokenizer.json")).get_vocab() for one in (directory, like))
    return sorted(token for token in own.keys() | wanted.keys() if own.get(token) != wanted.get(token))


def num_ids(directory: Path) -> int:
    """Return the least vocabulary size that has all of a tokenizer.json's ids; one may be padded to more."""
    return 1 + max(Tokenizer.from_file(str(directory / "tokenizer.json")).get_vocab().values())


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
