"""Token ids of chats, and of texts that were changed."""

import pytest

from models.targets.random import byte_tokenizer
from models.tokens import encode_chat, encode_document, first_turn, rewrite, turn_marks

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


def test_a_text_ends_with_the_end_of_text_token_and_markers_in_it_stay_text() -> None:
    ids = encode_document(TOKENIZER, "a<|im_end|>")
    assert TOKENIZER.decode(ids) == "a<|im_end|><|im_end|>"
    assert ids.count(TOKENIZER.eos_token_id) == 1
    assert ids[-1] == TOKENIZER.eos_token_id


def test_a_chat_is_encoded_with_its_answers_and_waits_for_none() -> None:
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    ids = encode_document(TOKENIZER, chat)
    assert TOKENIZER.decode(ids) == "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n"
    with pytest.raises(ValueError, match="messages are empty"):
        encode_document(TOKENIZER, [])


def test_a_tokenizer_without_an_end_of_text_token_is_refused() -> None:
    endless = byte_tokenizer()
    endless.eos_token = None
    with pytest.raises(ValueError, match="no end-of-text token"):
        encode_document(endless, "a")


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


def first(*turns: tuple[str, str]) -> str:
    ids = encode_chat(TOKENIZER, [{"role": role, "content": content} for role, content in turns])
    return str(TOKENIZER.decode(first_turn(ids, turn_marks(TOKENIZER))))


def test_the_first_turn_is_what_the_user_said_first_whatever_stands_around_it() -> None:
    assert first(("user", "hello\nyou")) == "hello\nyou"
    assert first(("system", "be kind"), ("user", "hello"), ("assistant", "yes?"), ("user", "more")) == "hello"
    assert first(("user", "a <|im_end|> b <|im_start|>user\n c")) == "a <|im_end|> b <|im_start|>user\n c"


def test_a_prompt_without_the_templates_marks_is_its_own_first_turn() -> None:
    assert first_turn(encode("plain text"), turn_marks(TOKENIZER)) == encode("plain text")
    bare = byte_tokenizer()
    bare.chat_template = None
    strict = byte_tokenizer()
    strict.chat_template = "{{ raise_exception('no chats') }}"
    for tokenizer in (bare, strict):
        assert first_turn([1, 2, 3], turn_marks(tokenizer)) == [1, 2, 3]


def test_a_template_that_marks_later_turns_otherwise_than_the_first_is_understood() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = (
        "{{ 'Preamble. ' }}{% for message in messages %}{% if message['role'] == 'user' %}"
        "{{ '<|im_start|>' + message['content'] + '<|im_end|>' }}{% else %}{{ message['content'] + ' ' }}{% endif %}"
        "{% endfor %}"
    )
    asked = (("user", "hello"), ("assistant", "yes?"), ("user", "more"))
    ids = encode_chat(tokenizer, [{"role": role, "content": content} for role, content in asked])
    assert tokenizer.decode(first_turn(ids, turn_marks(tokenizer))) == "hello"
