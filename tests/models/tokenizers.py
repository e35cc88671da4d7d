"""Small tokenizers of four kinds, and ten chat templates, each of which handles what a client wrote otherwise."""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from itertools import chain

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from models.targets.random import byte_tokenizer

CORPUS = ["hello world im_end think tool_call response assistant user system function name arguments city Paris"] * 50
SPECIAL = ("<|im_start|>", "<|im_end|>")
OTHERS = ("<think>", "</think>", "</tool_response>", "<tool_call>")
MARKERS = [*SPECIAL, *OTHERS]
VOCABULARY = 420

HEAD = "{% for m in messages %}<|im_start|>{{ m.role }}\n"
TAIL = "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
CALLS = "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.arguments | tojson }}{% endfor %}"
LISTED = "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
SPLIT = (
    "{% if m.role == 'assistant' and '</think>' in m.content %}{{ m.content.split('</think>')[-1].lstrip('\n') }}"
    "{% else %}{{ m.content }}{% endif %}"
)
PARTS = (
    "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}{{ p.text | trim }}{% endfor %}"
    "{% endif %}"
)
TEMPLATES = {
    "plain": f"{HEAD}{{{{ m.content }}}}{TAIL}",
    "trimmed": f"{HEAD}{{{{ m.content | trim }}}}{TAIL}",
    "in capitals": f"{HEAD}{{{{ m.content | upper }}}}{TAIL}",
    "in small letters": f"{HEAD}{{{{ m.content | lower }}}}{TAIL}",
    "without thoughts": f"{HEAD}{SPLIT}{TAIL}<think>\n",
    "with tools": f"{LISTED}{HEAD}{{{{ m.content }}}}{CALLS}{TAIL}",
    "with tools in ASCII": f"{LISTED}{HEAD}{{{{ m.content }}}}{CALLS}{TAIL}".replace(
        "tojson", "tojson(ensure_ascii=True)"
    ),
    "of parts": f"{HEAD}{PARTS}{TAIL}",
    "of all fields": (
        "<|im_start|>system\n{{ style }}<|im_end|>\n{{ tools | tojson }}"
        "{% for t in tools or [] %}{% for key in t.function.parameters %}<{{ key }}>{% endfor %}{% endfor %}"
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{{ m | tojson }}{% for key, value in m.items() %}<{{ key }}>{{ value }}</{{ key }}>{% endfor %}<|im_end|>\n"
        "{% endfor %}"
    ),
    "by turn": (
        "{% for m in messages %}<|im_start|>{{ m.role }} {{ loop.index }} of {{ messages | length }}\n"
        "{% if m.role == 'assistant' and m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
        "{% if m.name %}{{ m.name }}: {% endif %}{{ m.content }}{% if not loop.last %}<|im_end|>\n{% endif %}"
        "{% endfor %}"
    ),
}


def _byte_level(*special: str) -> Tokenizer:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, initial_alphabet=alphabet, special_tokens=[*special], show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    return backend


def _metaspace() -> Tokenizer:
    backend = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    characters = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    backend.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=characters, show_progress=False)
    )
    # What the trainer made special are bytes to the others of this kind.
    state = json.loads(backend.to_str())
    return Tokenizer.from_str(json.dumps({**state, "added_tokens": []}))


def _normalising() -> Tokenizer:
    backend = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    backend.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    letters = [chr(code) for code in range(33, 127)]
    trainer = trainers.WordPieceTrainer(
        vocab_size=VOCABULARY, special_tokens=["[UNK]"], initial_alphabet=letters, show_progress=False
    )
    backend.train_from_iterator([*CORPUS, " ".join(letters)], trainer)
    return backend


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "byte level": _byte_level,
    "in the vocabulary": partial(_byte_level, *MARKERS),
    "metaspace": _metaspace,
    "normalising": _normalising,
}


def byte_ids(messages: Sequence[Mapping[str, str]], answers: bool = True) -> list[int]:
    """Return the ids of a chat for the target of random weights, put together by hand; all of `content` is text.

    Args:
        messages: with a text each.
        answers: whether the assistant is to answer.
    """
    tokenizer = byte_tokenizer()
    begin, end = tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])

    def text(of: str) -> list[int]:
        ids: list[int] = tokenizer.encode(of, add_special_tokens=False, split_special_tokens=True)
        return ids

    turns = [[begin, *text(f"{one['role']}\n{one['content']}"), end, *text("\n")] for one in messages]
    return [*chain.from_iterable(turns), *([begin, *text("assistant\n")] if answers else [])]


@cache
def tokenizer_of(kind: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer, with the markers of `SPECIAL` and `OTHERS`, the latter as text would be normalised."""
    backend = KINDS[kind]()
    normalised = kind == "normalising"
    backend.add_special_tokens([AddedToken(marker, rstrip=kind == "metaspace") for marker in SPECIAL])
    backend.add_tokens([AddedToken(marker, special=False, normalized=normalised) for marker in OTHERS])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>")
