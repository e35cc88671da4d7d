"""Which conversations belong together: the same first turn, much wording in common, or a group that was named.

A cluster is the unit of a split and of its statistics, so that turns of a chat, near copies and fillings of a template
stay on one side. What shares no wording is seen to belong together only where somebody says so, as of functions of one
module that are asked for by their docstrings. A group of more than a quarter of a domain's conversations joins none of
them: else who puts everything into one group would leave nothing to hold out, or nothing to train on.

First turns are sketched by keyed hashes of their token n-grams, the smallest ones, so that no client can compute where
a prompt will fall. What more than a twentieth of a domain's conversations share is how the domain words things and
joins nothing: without this a template would make one cluster of a domain. Fillings of such a template may thus be on
both sides. As long as it is asked for, that overstates no gain: a filling that was held out is as new to a draft as
the next one that comes, since what fillings share beside the template joins them
(`tests/tasks/stages/test_templates.py` plants it). Turns that have next to nothing else are held against each other by
all of it, so that copies stay together however many they are. Because what is common changes as a log grows, the
sketches are kept and the signatures (MinHash, banded) are made of them anew each time; that takes a second for ten
thousand.
"""

import hashlib
import os
import secrets
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jinja2 import TemplateError
from numpy.typing import NDArray
from scipy.sparse import coo_matrix
from scipy.sparse.csgraph import connected_components

PAPER = "Broder 1997, On the resemblance and containment of documents; Leskovec et al. 2020, chapter 3"
NGRAM = 5  # tokens
SKETCH_SIZE = 128  # hashes of a conversation
NUM_BANDS, BAND = 64, 2
MIN_RESEMBLANCE, MIN_RESEMBLANCE_OF_COPIES = 0.2, 0.5
# Of a domain's conversations; a hash in more of them says nothing. A domain of few has at least so many.
MAX_SHARE, MIN_COMMON = 0.05, 5
MAX_GROUP_SHARE, MOST_OF_FEW = 0.25, 20  # the same of a group; in a domain of few it may have so many
HASH_BYTES, NAME_BYTES = 8, 16

Hashes = NDArray[np.uint64]


class Sketch(NamedTuple):
    """What is kept of a first turn: the keyed hash of all of it, and the smallest ones of its n-grams, ascending."""

    turn: bytes
    grams: Hashes


def sketch(turn_ids: Sequence[int], secret: bytes) -> Sketch:
    """Hash a first turn of at least one token by a secret of up to 64 bytes, the home's."""
    ids = np.asarray(turn_ids, dtype=np.uint32).tobytes()
    width = NGRAM * 4
    spans = {ids[start : start + width] for start in range(0, max(1, len(ids) - width + 4), 4)}
    hashed = b"".join(hashlib.blake2b(span, digest_size=HASH_BYTES, key=secret).digest() for span in spans)
    grams = np.unique(np.frombuffer(hashed, dtype=np.uint64))[:SKETCH_SIZE]
    return Sketch(hashlib.blake2b(ids, digest_size=NAME_BYTES, key=secret, person=b"turn").digest(), grams)


def join(sketches: Sequence[Sketch], domains: Sequence[str]) -> list[str]:
    """Return the name of each conversation's cluster: the keyed hash of its earliest member's first turn.

    Clusters are what links connect, over any number of steps and domains [N]. A link is an equal first turn, or a
    resemblance of at least a fifth, estimated: the n-grams that two turns share over those that either has.
    Sketches [N] are in the order of time.
    """
    if not sketches:
        return []
    turns, numbers = [one.turn.hex() for one in sketches], np.arange(len(sketches))
    _, first, same = np.unique(np.array(turns), return_index=True, return_inverse=True)
    sizes = np.array([len(one.grams) for one in sketches])
    grams, owner = np.concatenate([one.grams for one in sketches]), np.repeat(numbers, sizes)
    # What is in too many conversations of its domain says nothing.
    _, of_domain, in_domain = np.unique(np.array(domains), return_inverse=True, return_counts=True)
    keys = grams ^ (of_domain[owner].astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15))
    _, which, counts = np.unique(keys, return_inverse=True, return_counts=True)
    telling = counts[which] <= np.maximum(MIN_COMMON, MAX_SHARE * in_domain)[of_domain[owner]]
    copies = np.bincount(owner[telling], minlength=len(sketches))[owner] <= NGRAM
    links = [
        np.stack([numbers, first[same]]),
        *_banded(grams[telling], owner[telling], MIN_RESEMBLANCE),
        *_banded(grams[copies], owner[copies], MIN_RESEMBLANCE_OF_COPIES),
    ]
    return _earliest(turns, np.concatenate(links, axis=1))


def join_groups(alike: Sequence[str], domains: Sequence[str], groups: Sequence[str | None]) -> list[str]:
    """Return the name of each conversation's cluster where groups join what is alike: that of its earliest member.

    `alike` [N] are their clusters by wording, see `join`, in the order of time; `groups` [N] what each was said to
    belong to, None where nothing was said, also across domains [N].
    """
    sizes, held = Counter(domains), Counter(zip(domains, groups, strict=True))
    first: dict[tuple[str, str], int] = {}
    links = []
    for number, (name, domain, group) in enumerate(zip(alike, domains, groups, strict=True)):
        links.append((number, first.setdefault(("alike", name), number)))
        if group is not None and held[domain, group] <= _most_of_group(sizes[domain]):
            links.append((number, first.setdefault(("group", group), number)))
    return _earliest(alike, np.array(links, dtype=np.int64).reshape(-1, 2).T)


def num_tests(groups: Mapping[str | None, int]) -> int:
    """Return how many conversations would count if all of a domain's groups [group → number] were held out."""
    most = _most_of_group(sum(groups.values()))
    return sum(1 if group is not None and number <= most else number for group, number in groups.items())


def _most_of_group(size: int) -> float:
    """Return how many of a domain's `size` conversations a group may have and still join them."""
    return max(MOST_OF_FEW, MAX_GROUP_SHARE * size)


def _earliest(names: Sequence[str], links: NDArray[np.int64]) -> list[str]:
    """Return for each of [N] names that of the first one that links [2, E] connect it with."""
    graph = coo_matrix((np.ones(links.shape[1], dtype=np.int8), tuple(links)), shape=(len(names),) * 2)
    _, labels = connected_components(graph, directed=False)
    earliest: dict[int, str] = {}
    return [earliest.setdefault(int(label), name) for label, name in zip(labels, names, strict=True)]


def _banded(grams: Hashes, owner: NDArray[np.int64], least: float) -> list[NDArray[np.int64]]:
    """Return links as [2, E] each: every conversation of a band's bucket to the first one in it, where they hold."""
    owners, starts = np.unique(owner, return_index=True)
    if not len(owners):
        return []
    # [N, NUM_BANDS·BAND] minima of hashes under so many permutations.
    rng = np.random.default_rng(0)  # the hashes are keyed, so that the permutations need not be
    factors = rng.integers(0, 1 << 63, NUM_BANDS * BAND, dtype=np.uint64) * np.uint64(2) + np.uint64(1)
    minima = [np.minimum.reduceat((grams * factor) >> np.uint64(32), starts) for factor in factors]
    signatures = np.stack(minima, axis=1)
    links = []
    for band in range(NUM_BANDS):
        left, right = signatures[:, BAND * band], signatures[:, BAND * band + 1]
        _, first, bucket = np.unique(left << np.uint64(32) | right, return_index=True, return_inverse=True)
        one, other = np.arange(len(owners)), first[bucket]
        one, other = one[one != other], other[one != other]
        holds = (signatures[one] == signatures[other]).mean(axis=1) >= least
        links.append(np.stack([owners[one[holds]], owners[other[holds]]]))
    return links


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
