"""Prompts and texts made from nothing: a small grammar over invented words, for runs that must need no data at all.

The words are spelt from syllables drawn by `domain` and `word_seed` together, so two domains share almost no word even
at one seed: a draft trained on one gains nothing on the other, which is what a test of drift needs.
"""

import random
from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from models.params import BaseParams
from models.sources import Document, Message, Prompt

_SENTENCES = (
    "How does the {a} {b} a {c}?",
    "Tell me about the {a} that can {b} the {c}.",
    "Write a list: {a}, {b}, {c}.",
    "Why would a {a} {b} the {c} of a {a}?",
    "Say what {a} and {c} have to do with {b}.",
)
_CONSONANTS, _VOWELS = "bdfgklmnprstvz", "aeiou"


class Params(BaseParams):
    """Size and look of the stream."""

    name: Literal["synthetic"] = "synthetic"
    count: int = Field(64, ge=1, description="prompts or documents.")
    num_groups: int = Field(16, ge=1, description="groups that they fall into.")
    domain: str = Field("synthetic", min_length=1, description="name of the domain.")
    word_seed: int = Field(0, description="another seed gives the domain other words.")
    num_words: int = Field(96, ge=3, le=10_000, description="words of the domain; each group talks about one of them")
    num_sentences: int = Field(4, ge=1, description="in a document")


def prompts(params: Params) -> list[Prompt]:
    """Return `count` different prompts, the groups in turn; ValueError if `count` is more than the grammar can say."""
    return [
        Prompt(messages=(Message(role="user", content=content),), domain=params.domain, group=group)
        for content, group in _texts(params, num_sentences=1)
    ]


def documents(params: Params) -> list[Document]:
    """Return `count` different texts, the groups in turn; each is about its group's word. ValueError if `count` is more
    than the grammar can say."""
    return [
        Document(content=content, domain=params.domain, group=group)
        for content, group in _texts(params, params.num_sentences)
    ]


def _texts(params: Params, num_sentences: int) -> Iterator[tuple[str, str]]:
    rng = random.Random(f"{params.domain}/{params.word_seed}")
    words = _words(rng, params.num_words)
    found: set[str] = set()
    for _ in range(20 * params.count):
        group = len(found) % params.num_groups
        topic = words[group % len(words)]
        text = " ".join(_sentence(rng, words, topic) for _ in range(num_sentences))
        if text not in found:
            found.add(text)
            yield text, f"{params.domain}:{group}"
        if len(found) == params.count:
            return
    raise ValueError(f"count is {params.count}, but {params.num_words} words make only some {len(found)} texts")


def _sentence(rng: random.Random, words: list[str], topic: str) -> str:
    verb, thing = rng.choice(words), rng.choice(words)
    return rng.choice(_SENTENCES).format(a=topic, b=verb, c=thing)


def _words(rng: random.Random, count: int) -> list[str]:
    # A domain spells with 6 of the 14 consonants, so its syllables look unlike another domain's.
    consonants = rng.sample(_CONSONANTS, 6)
    words: dict[str, None] = {}
    while len(words) < count:
        words["".join(rng.choice(consonants) + rng.choice(_VOWELS) for _ in range(rng.randint(2, 3)))] = None
    return list(words)
