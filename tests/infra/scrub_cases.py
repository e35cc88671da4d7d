"""The labelled texts of tests/infra/scrubbing, and how a scrubber does on them."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent / "scrubbing"
PLACEHOLDER = re.compile(r"\[[A-Z]{2,}\]")
SLACK = 3  # characters around a secret that may go with it, such as quotes
ESCAPE = re.compile(r"\\(n|\\|u[0-9a-f]{4})")


class Case(NamedTuple):
    """A text, and the stretches of it, first and behind last character, that must go."""

    kind: str
    text: str
    secrets: tuple[tuple[int, int], ...]


class Score(NamedTuple):
    """How many stretches must go, how many of them went, how many replacements were made, and how many were right."""

    wanted: int
    found: int
    replaced: int
    right: int

    @property
    def recall(self) -> float:
        return self.found / self.wanted

    @property
    def precision(self) -> float:
        return self.right / self.replaced


def read_cases(name: str) -> list[Case]:
    """Read "cases" or "held_out"."""
    lines = (ROOT / f"{name}.tsv").read_text(encoding="utf-8").splitlines()
    return [_parse(*line.split("\t", 1)) for line in lines]


def judge(cases: list[Case], scrub: Callable[[str], str]) -> tuple[Score, list[str]]:
    """Score a scrubber; beside it, the lines of what it missed or took by mistake."""
    counts, faults = [0, 0, 0, 0], []
    for case in cases:
        scrubbed = scrub(case.text)
        gone = replacements(case.text, scrubbed)
        found = [secret for secret in case.secrets if any(a <= secret[0] and secret[1] <= b for a, b in gone)]
        right = [one for one in gone if any(_within(one, secret) for secret in case.secrets)]
        counts = [sum(both) for both in zip(counts, map(len, (case.secrets, found, gone, right)), strict=True)]
        if len(found) < len(case.secrets) or len(right) < len(gone):
            faults.append(f"{case.kind}: {case.text!r} became {scrubbed!r}")
    return Score(*counts), faults


def replacements(text: str, scrubbed: str) -> list[tuple[int, int]]:
    """Return the stretches of `text` that placeholders stand for in `scrubbed`."""
    kept = PLACEHOLDER.split(scrubbed)
    match = re.fullmatch("(.+?)".join(map(re.escape, kept)), text, re.DOTALL)
    assert match is not None, f"more than placeholders changed in {scrubbed!r}"
    return [match.span(number) for number in range(1, len(kept))]


def _within(gone: tuple[int, int], secret: tuple[int, int]) -> bool:
    """Return whether a replacement takes a secret or a part of it, and next to nothing else."""
    (a, b), (start, end) = gone, secret
    return a < end and start < b and start - SLACK <= a and b <= end + SLACK


def _parse(kind: str, line: str) -> Case:
    line = ESCAPE.sub(lambda match: _escaped(match[1]), line)
    text, secrets, start = "", [], 0
    for part in re.split("([⟦⟧])", line.replace("¦", "")):
        if part == "⟦":
            start = len(text)
        elif part == "⟧":
            secrets.append((start, len(text)))
        else:
            text += part
    return Case(kind, text, tuple(secrets))


def _escaped(name: str) -> str:
    return {"n": "\n", "\\": "\\"}.get(name) or chr(int(name[1:], 16))
