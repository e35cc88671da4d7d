"""From messages to token ids.

The chat template writes its markers as text, so a user who types a marker could close their own turn. The template is
rendered with a private stand-in for each message's content, and the contents are encoded apart, with special tokens
off.
"""

import secrets
from collections.abc import Mapping, Sequence
from typing import Any


def encode_chat(tokenizer: Any, messages: Sequence[Mapping[str, str]]) -> list[int]:
    """Encode a chat up to the point where the assistant answers.

    Args:
        tokenizer: a Hugging Face tokenizer with a chat template.
        messages: {"role", "content"} each; the last one is not the assistant's.

    Raises:
        ValueError: there are no messages, or the template drops one of them.
    """
    if not messages:
        raise ValueError("messages are empty; at least one was wanted")
    marks = [f"\ue000{secrets.token_hex(8)}\ue001" for _ in messages]
    masked = [{"role": m["role"], "content": mark} for m, mark in zip(messages, marks, strict=True)]
    rest = tokenizer.apply_chat_template(masked, add_generation_prompt=True, tokenize=False)
    ids: list[int] = []
    for message, mark in zip(messages, marks, strict=True):
        head, found, rest = rest.partition(mark)
        if not found:
            raise ValueError(f"the chat template leaves out a message of role {message['role']!r}")
        ids += tokenizer.encode(head, add_special_tokens=False)
        ids += tokenizer.encode(message["content"], add_special_tokens=False, split_special_tokens=True)
    return ids + tokenizer.encode(rest, add_special_tokens=False)
