"""Prompts made from nothing: a small grammar over invented words, for runs that must need no data at all.

The words are spelt from syllables drawn by `domain` and `word_seed` together, so two domains share almost no word even
at one seed: a draft trained on one gains nothing on the other, which is what a test of drift needs.
"""

import random
from typing import Literal

from pydantic import Field

from models.params import BaseParams
from models.sources import Message, Prompt

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
    count: int = Field(64, ge=1)
    num_groups: int = Field(16, ge=1)
    domain: str = Field("synthetic", min_length=1)
    word_seed: int = 0
    num_words: int = Field(96, ge=3, le=10_000, description="words of the domain; each group talks about one of them")


def prompts(params: Params) -> list[Prompt]:
    """Return `count` different prompts, the groups in turn.

    Raises:
        ValueError: `count` is more than the grammar can say.
    """
    rng = random.Random(f"{params.domain}/{params.word_seed}")
    words = _words(rng, params.num_words)
    found: dict[str, Prompt] = {}
    for _ in range(20 * params.count):
        prompt = _prompt(rng, words, len(found) % params.num_groups, params.domain)
        found.setdefault(prompt.id, prompt)
        if len(found) == params.count:
            return list(found.values())
    raise ValueError(f"count is {params.count}, but {params.num_words} words make only some {len(found)} prompts")


def _prompt(rng: random.Random, words: list[str], group: int, domain: str) -> Prompt:
    topic, verb, thing = words[group % len(words)], rng.choice(words), rng.choice(words)
    content = rng.choice(_SENTENCES).format(a=topic, b=verb, c=thing)
    return Prompt(messages=(Message(role="user", content=content),), domain=domain, group=f"{domain}:{group}")


def _words(rng: random.Random, count: int) -> list[str]:
    # A domain spells with 6 of the 14 consonants, so its syllables look unlike another domain's.
    consonants = rng.sample(_CONSONANTS, 6)
    words: dict[str, None] = {}
    while len(words) < count:
        words["".join(rng.choice(consonants) + rng.choice(_VOWELS) for _ in range(rng.randint(2, 3)))] = None
    return list(words)
