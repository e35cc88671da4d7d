"""An erasure at work: the rows, and what is known of it so far."""

from functools import cached_property
from typing import Any

from infra.consent import QueryRow
from infra.erasures import Certificate
from infra.querylog import QueryLog
from infra.settings import Settings


class Job:
    def __init__(self, settings: Settings, log: QueryLog, step: int, certificate: Certificate) -> None:
        self.settings, self.log, self.certificate = settings, log, certificate
        self._step = step

    @cached_property
    def rows(self) -> list[QueryRow]:
        """The rows, with their text; none once it was forgotten."""
        return self.log.erasures.rows(self.certificate.number)

    @cached_property
    def ids(self) -> frozenset[str]:
        """By which samples, scores and hidden states name the rows."""
        return frozenset(row.id for row in self.rows)

    def keep(self, **found: Any) -> None:
        self.certificate = self.certificate.with_(**found)
        self.log.erasures.enter(self.certificate, self._step)

    def done(self, next_step: int) -> None:
        self._step = next_step
        self.log.erasures.enter(self.certificate, next_step)
