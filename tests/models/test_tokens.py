"""What tokens tell of the texts that they were made of."""

from models.chats import ChatEncoder
from models.targets.random import byte_tokenizer
from models.tokens import first_turn, turn_marks

TOKENIZER = byte_tokenizer()


def encode(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


def first(*turns: tuple[str, str]) -> str:
    ids = ChatEncoder.of(TOKENIZER).encode([{"role": role, "content": content} for role, content in turns])
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
    ids = ChatEncoder.of(tokenizer).encode([{"role": role, "content": content} for role, content in asked])
    assert tokenizer.decode(first_turn(ids, turn_marks(tokenizer))) == "hello"
