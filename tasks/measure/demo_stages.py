"""The stages of the demonstration, announced and timed."""

import time

from infra.views.results import out


class Stages:
    """What is done one after the other, and how long each took.

    Attributes:
        seconds: stage to seconds, of those that are done.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._started_s = time.monotonic()
        self._current: tuple[str, float] | None = None

    def start(self, name: str, said: str = "") -> None:
        """End a stage and announce the next one, by its name or in other words."""
        now_s = time.monotonic()
        if self._current is not None:
            self.seconds[self._current[0]] = round(now_s - self._current[1], 1)
        self._current = (name, now_s)
        out.rule(said or name, align="left")

    def total_s(self) -> float:
        """Return the seconds since the first stage."""
        return round(time.monotonic() - self._started_s, 1)
