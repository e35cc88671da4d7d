"""From messages and documents to token ids, and from ids to others with a changed text.

The chat template writes its markers as text, so a user who types a marker could close their own turn. The template is
rendered with a private stand-in for each message's content, and the contents are encoded apart, with special tokens
off.
"""

import secrets
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any

from jinja2 import TemplateError


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
