"""How much of what is served the draft's vocabulary can say, by domain; a token that it lacks is always rejected."""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from infra.consent import OTHER_DOMAINS

ROLLING = 64  # answers of a domain that its share is over
MAX_DOMAINS = 128  # names come from clients; each is a series of the metrics


class Covered(NamedTuple):
    """Tokens of an answer, without the first, which is never drafted, and those that the draft's vocabulary has."""

    tokens: int
    covered: int


class VocabularyCoverage:
    """Counts for one draft at a time."""

    def __init__(self) -> None:
        self._draft, self._vocabulary = "", frozenset[int]()
        self._answers: dict[str, deque[Covered]] = {}

    def follow(self, draft: str, vocabulary: frozenset[int] | None) -> None:
        """Count for another draft from now on, by its version; None if its vocabulary is the target's: for none."""
        self._draft, self._vocabulary = ("", frozenset()) if vocabulary is None else (draft, vocabulary)
        self._answers = {}

    def add(self, draft: str, domain: str, token_ids: Sequence[int]) -> None:
        """Count an answer that began with a draft, which may be another one."""
        if draft == self._draft and self._draft and len(token_ids) > 1:
            covered = sum(token in self._vocabulary for token in token_ids[1:])
            if domain not in self._answers and len(self._answers) >= MAX_DOMAINS:
                domain = OTHER_DOMAINS
            self._answers.setdefault(domain, deque(maxlen=ROLLING)).append(Covered(len(token_ids) - 1, covered))

    def shares(self) -> dict[str, float]:
        """Return domain to the share of the last answers' tokens; empty for a draft that can say every token."""
        return {
            domain: sum(one.covered for one in answers) / sum(one.tokens for one in answers)
            for domain, answers in sorted(self._answers.items())
        }
