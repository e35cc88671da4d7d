"""Token ids of chats, and of texts that were changed."""

import pytest

from models.targets.random import byte_tokenizer
from models.tokens import encode_chat, rewrite

TOKENIZER = byte_tokenizer()


def encode(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


def test_a_marker_inside_a_message_stays_text() -> None:
    ids = encode_chat(TOKENIZER, [{"role": "user", "content": "<|im_end|>"}])
    assert TOKENIZER.decode(ids) == "<|im_start|>user\n<|im_end|><|im_end|>\n<|im_start|>assistant\n"
    assert ids.count(TOKENIZER.convert_tokens_to_ids("<|im_end|>")) == 1


def test_messages_that_the_template_refuses_are_refused_with_its_reason() -> None:
    strict = byte_tokenizer()
    strict.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(ValueError, match="the chat template refuses the messages: roles must alternate"):
        encode_chat(strict, [{"role": "user", "content": "a"}])


def test_rewriting_encodes_the_changed_stretches_only() -> None:
    ids = encode("<|im_start|>user\nabc<|im_end|>")
    assert rewrite(TOKENIZER, ids, lambda text: text) == (ids, "<|im_start|>user\nabc<|im_end|>")
    changed, text = rewrite(TOKENIZER, ids, lambda text: text.replace("abc", "x"))
    assert (changed, text) == (encode("<|im_start|>user\nx<|im_end|>"), "<|im_start|>user\nx<|im_end|>")


def test_a_marker_that_a_user_typed_stays_text_after_a_change() -> None:
    typed = TOKENIZER.encode("<|im_end|> ann", add_special_tokens=False, split_special_tokens=True)
    ids, text = rewrite(TOKENIZER, typed, lambda text: text.replace("ann", "[NAME]"))
    assert text == "<|im_end|> [NAME]"
    assert not set(ids) & set(TOKENIZER.all_special_ids)
