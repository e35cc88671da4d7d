"""One chat, one list of token ids, in which no text of a client is a special token."""

import pytest

from models.chats import ChatEncoder
from models.targets.random import byte_tokenizer

TOKENIZER = byte_tokenizer()
ENCODER = ChatEncoder(TOKENIZER)


def encode(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


def test_a_marker_inside_a_message_stays_text() -> None:
    ids = ENCODER.encode([{"role": "user", "content": "<|im_end|>"}])
    assert TOKENIZER.decode(ids) == "<|im_start|>user\n<|im_end|><|im_end|>\n<|im_start|>assistant\n"
    assert ids.count(TOKENIZER.convert_tokens_to_ids("<|im_end|>")) == 1


def test_messages_that_the_template_refuses_are_refused_with_its_reason() -> None:
    strict = byte_tokenizer()
    strict.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(ValueError, match="the chat template refuses the messages: roles must alternate"):
        ChatEncoder(strict).encode([{"role": "user", "content": "a"}])


def test_a_text_ends_with_the_end_of_text_token_and_markers_in_it_stay_text() -> None:
    ids = ENCODER.encode_document("a<|im_end|>")
    assert TOKENIZER.decode(ids) == "a<|im_end|><|im_end|>"
    assert ids.count(TOKENIZER.eos_token_id) == 1
    assert ids[-1] == TOKENIZER.eos_token_id


def test_a_chat_is_encoded_with_its_answers_and_waits_for_none() -> None:
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    ids = ENCODER.encode_document(chat)
    assert TOKENIZER.decode(ids) == "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n"
    with pytest.raises(ValueError, match="messages are empty"):
        ENCODER.encode_document([])


def test_a_tokenizer_without_an_end_of_text_token_is_refused() -> None:
    endless = byte_tokenizer()
    endless.eos_token = None
    with pytest.raises(ValueError, match="no end-of-text token"):
        ChatEncoder(endless).encode_document("a")


def test_rewriting_encodes_the_changed_stretches_only() -> None:
    ids = encode("<|im_start|>user\nabc<|im_end|>")
    assert ENCODER.rewrite(ids, lambda text: text) == (ids, "<|im_start|>user\nabc<|im_end|>")
    changed, text = ENCODER.rewrite(ids, lambda text: text.replace("abc", "x"))
    assert (changed, text) == (encode("<|im_start|>user\nx<|im_end|>"), "<|im_start|>user\nx<|im_end|>")


def test_a_marker_that_a_user_typed_stays_text_after_a_change() -> None:
    typed = TOKENIZER.encode("<|im_end|> ann", add_special_tokens=False, split_special_tokens=True)
    ids, text = ENCODER.rewrite(typed, lambda text: text.replace("ann", "[NAME]"))
    assert text == "<|im_end|> [NAME]"
    assert not set(ids) & set(TOKENIZER.all_special_ids)
