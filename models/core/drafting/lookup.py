"""Look-up: find where the end of a sequence stood before, and draft what followed it there. Nothing is learnt.

Code repeats its prompt, and answers to one client repeat each other. A match of more tokens is accepted more often, so
the longest one wins; of equally long ones the sequence's own before another's, and the latest of them. What follows a
match may run into the end that was looked up: then the text repeats itself, and the draft goes on doing so.

Unlike `models.drafts.ngram`, which is a draft family of its own and reads the whole sequence at each step, a `Sequence`
remembers the places of its n-grams, so that a step costs what was added since the last one.
"""

from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice, takewhile
from operator import itemgetter
from typing import NamedTuple

PAPER = "arXiv:2304.04487, prompt look-up; arXiv:2411.04975, suffixes of recent answers"

# Places of an n-gram that are compared, the latest: a run of blanks stands everywhere.
MAX_PLACES = 16
MAX_STORED_PLACES = 5000  # of a store, whose continuations are counted; as REST's own


class Match(NamedTuple):
    """What is drafted from a place, and how many tokens before it equal the sequence's last ones."""

    length: int
    token_ids: list[int]


NOTHING = Match(0, [])


class _Text:
    """Token ids with the places that follow each of their n-grams."""

    def __init__(self, shortest: int) -> None:
        self.token_ids: list[int] = []
        self._shortest = shortest
        self._places: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)

    def extend(self, token_ids: Iterable[int]) -> None:
        for token in token_ids:
            if len(self.token_ids) >= self._shortest:
                self._places[tuple(self.token_ids[-self._shortest :])].append(len(self.token_ids))
            self.token_ids.append(token)

    def places(self, end: list[int], longest: int, limit: int = MAX_PLACES) -> Iterator[tuple[int, int]]:
        """Yield (matched tokens, place) for at most `limit` places that follow the end of `end`, the latest first."""
        for place in islice(reversed(self._places.get(tuple(end[-self._shortest :]), ())), limit):
            size, most = self._shortest, min(longest, place, len(end))
            while size < most and self.token_ids[place - size - 1] == end[-size - 1]:
                size += 1
            yield size, place


class Store:
    """Texts that are looked up and don't change; neither a match nor what follows it reaches from one into the next."""

    _BORDER = -1  # no token id

    def __init__(self, texts: Iterable[list[int]], shortest: int) -> None:
        """Hold the token ids of texts; matches have at least `shortest` tokens."""
        self.texts = list(texts)
        self._text = _Text(shortest)
        for text in self.texts:
            self._text.extend([*text, self._BORDER])

    def continuations(self, end: list[int], longest: int, num_tokens: int) -> list[list[int]]:
        """Return what followed the longest match, up to `longest` tokens, of a text's end, the latest places first."""
        found = list(self._text.places(end, longest, MAX_STORED_PLACES))
        most = max(found, default=(0, 0))[0]
        after = (self._text.token_ids[place : place + num_tokens] for size, place in found if size == most)
        return [list(takewhile(self._BORDER.__ne__, one)) for one in after]


class Answers:
    """Recent answers of one API key, the oldest half of which are forgotten at a time."""

    def __init__(self, shortest: int, capacity: int) -> None:
        """Hold at most `capacity` tokens; matches have at least `shortest`."""
        self._shortest, self._capacity = shortest, capacity
        self._texts = [_Text(shortest), _Text(shortest)]  # the older half, the newer half

    def add(self, token_ids: list[int]) -> None:
        """Remember an answer; one beyond half of the capacity is cut."""
        if len(self._texts[1].token_ids) + len(token_ids) > self._capacity // 2:
            self._texts = [self._texts[1], _Text(self._shortest)]
        self._texts[1].extend(token_ids[: self._capacity // 2])

    def texts(self) -> Iterator[_Text]:
        """Yield the newer half, then the older one."""
        return reversed(self._texts)


class Sequence(_Text):
    """One request's tokens, prompt and answer, as far as they are known; `answers` may be looked up too."""

    def __init__(self, shortest: int, longest: int, answers: Answers | None = None) -> None:
        """Look up the last `shortest` to `longest` tokens; ValueError unless 1 ≤ shortest ≤ longest."""
        if not 1 <= shortest <= longest:
            raise ValueError(f"wanted 1 ≤ shortest ≤ longest; got {shortest} and {longest}")
        super().__init__(shortest)
        self.answers, self._longest = answers, longest

    def __len__(self) -> int:
        return len(self.token_ids)

    def look_up(self, num_tokens: int) -> Match:
        """Return the longest match with at most `num_tokens` tokens that followed it; NOTHING where there is none."""
        end = self.token_ids
        texts = [self, *(self.answers.texts() if self.answers is not None else ())]
        places = ((size, place, text) for text in texts for size, place in text.places(end, self._longest))
        size, place, text = max(places, key=itemgetter(0), default=(0, 0, self))
        if not size or num_tokens < 1:
            return NOTHING
        found = text.token_ids[place : place + num_tokens]
        if text is self:
            period = len(end) - place
            while len(found) < num_tokens:
                found.append(found[len(found) - period])
        return Match(size, found)


@dataclass
class NgramIndex:
    """The sequences that run and the recent answers of each key; one key's text is never in another's draft.

    What was drafted shows in the time an answer takes, so what is looked up must be the asker's own.

    Attributes:
        shortest, longest: tokens of a match.
        capacity: tokens of recent answers that are held for each key; 0 looks up the sequence alone.
        max_keys: keys that answers are held for; the one that asked least recently is forgotten.
    """

    shortest: int
    longest: int
    capacity: int
    max_keys: int = 64
    _running: dict[str, tuple[Sequence, str | None, int]] = field(default_factory=dict)
    _answers: OrderedDict[str, Answers] = field(default_factory=OrderedDict)

    def sequence(self, request_id: str, key: str, num_prompt_tokens: int) -> Sequence:
        """Return a request's sequence, an empty one at first."""
        if request_id not in self._running:
            sequence = Sequence(self.shortest, self.longest, self._of(key) if self.capacity else None)
            self._running[request_id] = (sequence, key, num_prompt_tokens)
        return self._running[request_id][0]

    def close_all_but(self, request_ids: Iterable[str]) -> None:
        """Let requests that no longer run become recent answers of their keys."""
        for request_id in self._running.keys() - set(request_ids):
            sequence, key, num_prompt_tokens = self._running.pop(request_id)
            if self.capacity and key is not None:
                self._of(key).add(sequence.token_ids[max(0, num_prompt_tokens - self.shortest) :])

    def forget(self) -> int:
        """Forget all recent answers, and what runs when it ends; return how many tokens of answers were held.

        A request that has ended stays among those that run until the next step.
        """
        num_tokens = sum(len(text.token_ids) for answers in self._answers.values() for text in answers.texts())
        self._answers.clear()
        for request_id, (sequence, _, num_prompt_tokens) in self._running.items():
            sequence.answers = None
            self._running[request_id] = (sequence, None, num_prompt_tokens)
        return num_tokens

    def _of(self, key: str) -> Answers:
        answers = self._answers.setdefault(key, Answers(self.shortest, self.capacity))
        self._answers.move_to_end(key)
        if len(self._answers) > self.max_keys:
            self._answers.popitem(last=False)
        return answers
