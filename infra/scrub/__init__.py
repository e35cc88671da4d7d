"""Takes what points at a person or opens a door out of a text, before the text is written anywhere.

Every finder looks at the text as it is read (`infra.scrub.views`): what only hides a secret, such as zero-width
characters, full-width digits or a space after each letter, is folded first. Patterns are written for linear time: a
quantified run is possessive or bounded, and starts where the run starts. What has a check digit or a numbering plan is
checked (python-stdnum, phonenumbers); formats of keys are also those of detect-secrets.

Ordinary code and prose must come through unchanged, hence what is left alone: a bare run of digits that nothing nearby
calls a phone number (it may be a timestamp), loopback and unspecified addresses, slices such as `[1::2]`, the value of
a variable called `password` that reads like code. `tests/infra/scrubbing` holds what both sides look like.
"""

import re

from infra.scrub import keys, numbers
from infra.scrub.views import Found, views

# Raise it with any change of what is found: rows carry it, and a stored row can be scrubbed again.
REVISION = 2

KINDS = ("EMAIL", "PHONE", "CARD", "IBAN", "IP", "KEY", "JWT", "PASSWORD")
PLACEHOLDER = re.compile(rf"\[(?:{'|'.join(KINDS)})\]")
MAX_PASSES = 4  # a replacement may set free what stood beside it; one that keeps on doing so is made for it


def scrub(text: str) -> str:
    """Return `text` with each thing that must go replaced by its kind in brackets; placeholders stay as they are."""
    for _ in range(MAX_PASSES):
        found = find(text)
        if not found:
            break
        parts, end = [], 0
        for one in found:
            parts += [text[end : one.start], f"[{one.kind}]"]
            end = one.end
        text = "".join([*parts, text[end:]])
    return text


def find(text: str) -> list[Found]:
    """Return what must go, from left to right, without overlaps."""
    finders = (keys.find, numbers.find)
    found = [view.original(one) for view in views(text) for finder in finders for one in finder(view.text)]
    placeholders = [match.span() for match in PLACEHOLDER.finditer(text)] if found else []
    return _merged([one for one in found if not any(a < one.end and one.start < b for a, b in placeholders)])


def _merged(found: list[Found]) -> list[Found]:
    merged: list[list[Found]] = []
    end = -1
    for one in sorted(found):
        if one.start < end:
            merged[-1].append(one)
        else:
            merged.append([one])
        end = max(end, one.end)
    return [
        Found(parts[0].start, max(one.end for one in parts), max(parts, key=lambda one: one.end - one.start).kind)
        for parts in merged
    ]
