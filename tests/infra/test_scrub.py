import argparse
import email.message
import inspect
import json.decoder
import random
import re
from pathlib import Path
from typing import NamedTuple

import pytest

from infra.scrub import scrub
from tests.growth import ATTEMPTS, grows_linearly, time_s

LABELLED = Path(__file__).parent / "scrubbing"
WORDS = re.compile(r"\w+|\s+|[^\w\s]")
PLACEHOLDER, ESCAPE = re.compile(r"\[[A-Z]{2,}\]"), re.compile(r"\\(n|\\|u[0-9a-f]{4})")
SLACK = 3  # characters around a secret that may go with it, such as quotes


class Case(NamedTuple):
    """A text, and the stretches of it, first and behind last character, that must go."""

    kind: str
    text: str
    secrets: tuple[tuple[int, int], ...]


def read_cases(name: str) -> list[Case]:
    """Read "cases" or "held_out"."""
    lines = (LABELLED / f"{name}.tsv").read_text(encoding="utf-8").splitlines()
    return [parsed(*line.split("\t", 1)) for line in lines]


def parsed(kind: str, line: str) -> Case:
    def unescaped(match: re.Match[str]) -> str:
        return {"n": "\n", "\\": "\\"}.get(match[1]) or chr(int(match[1][1:], 16))

    text, secrets = "", []
    for number, part in enumerate(re.split("[⟦⟧]", ESCAPE.sub(unescaped, line).replace("¦", ""))):
        secrets += [(len(text), len(text) + len(part))] * (number % 2)
        text += part
    return Case(kind, text, tuple(secrets))


def replacements(text: str, scrubbed: str) -> list[tuple[int, int]]:
    """Return the stretches of `text` that placeholders stand for in `scrubbed`."""
    kept = PLACEHOLDER.split(scrubbed)
    match = re.fullmatch("(.+?)".join(map(re.escape, kept)), text, re.DOTALL)
    assert match is not None, f"more than placeholders changed in {scrubbed!r}"
    return [match.span(number) for number in range(1, len(kept))]


def is_of(gone: tuple[int, int], secret: tuple[int, int]) -> bool:
    """Return whether a replacement takes a secret or a part of it, and next to nothing else."""
    (a, b), (start, end) = gone, secret
    return a < end and start < b and start - SLACK <= a and b <= end + SLACK


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("mail john.doe+x@mail.example.com.", "mail [EMAIL]."),
        ("josé@exämple.com", "[EMAIL]"),
        ("邮箱foo@bar.com好", "邮箱[EMAIL]好"),
        ("call +44 20 7946 0958 now", "call [PHONE] now"),
        ("tel:+14155552671", "tel:[PHONE]"),
        ("(415) 555-2671 or 415-555-2671", "[PHONE] or [PHONE]"),
        ("06 12 34 56 78, 020 7946 0958", "[PHONE], [PHONE]"),
        ("4111 1111 1111 1111 and 378282246310005", "[CARD] and [CARD]"),
        ("GB82 WEST 1234 5698 7654 32 THANKS", "[IBAN] THANKS"),
        ("DE89370400440532013000", "[IBAN]"),
        ("10.1.2.3:80 from 192.168.0.1.", "[IP]:80 from [IP]."),
        ("2001:db8::1/32, fe80::1ff:fe23:4567:890a", "[IP]/32, [IP]"),
        ("sk-proj-abcdEFGH1234567890abcd", "[KEY]"),
        ("key=ghp_0123456789abcdefghijABCDEFGHIJ012345", "key=[KEY]"),
        ("AKIAIOSFODNN7EXAMPLE", "[KEY]"),
        ("Authorization: Bearer abc.def-123_456789xyz", "Authorization: Bearer [KEY]"),
        ("eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.SflKxwRJSMeKKF2QT4", "[JWT]"),
    ],
)
def test_each_kind_is_replaced_and_the_text_around_it_stays(text: str, wanted: str) -> None:
    assert scrub(text) == wanted


@pytest.mark.parametrize(
    "text",
    [
        "version 1.2.3, v1.2.3.4, torch==2.13.0, lodash@4.17.21, pkg@1.0.0-beta.rc",
        "2024-01-02 12:00:00.123456789 and 01.02.2024, 12:30:45, 1700000000, 1469598103934665603",
        "pi = 3.14159265358979; x = +1.23456789; y = x+12345678",
        "4111111111111112 fails Luhn, GB83 WEST 1234 5698 7654 32 fails mod 97",
        "a[1::2] + b[::2] + c[1000::200]; std::vector<int> v; x :: Int; add::cafe",
        "y = a@w.sum() + x@w.layer.sum(1)",
        '@app.route("/"); icon@2x.png; git@github.com:owner/project.git',
        'app.run(host="127.0.0.1"); bind("0.0.0.0"); listen("::1")',
        "string.digits == '0123456789'; bearer responsibilities-and-more; sk-learn-contrib-something",
        "range(100, 200, 3000); sizes = 320 240 1024",
    ],
)
def test_ordinary_code_and_prose_come_through_unchanged(text: str) -> None:
    assert scrub(text) == text


@pytest.mark.parametrize("name", ["cases", "held_out"])
def test_nearly_all_secrets_of_labelled_texts_go_and_nearly_nothing_else(name: str) -> None:
    wanted, found, replaced, right, faults = 0, 0, 0, 0, []
    for case in read_cases(name):
        gone = replacements(case.text, scrubbed := scrub(case.text))
        taken = [secret for secret in case.secrets if any(a <= secret[0] and secret[1] <= b for a, b in gone)]
        rightly = [one for one in gone if any(is_of(one, secret) for secret in case.secrets)]
        wanted, found = wanted + len(case.secrets), found + len(taken)
        replaced, right = replaced + len(gone), right + len(rightly)
        if len(taken) < len(case.secrets) or len(rightly) < len(gone):
            faults.append(f"{case.kind}: {case.text!r} became {scrubbed!r}")
    recall, precision = found / wanted, right / replaced
    print(f"\n{name}: recall {recall:.3f} ({found} of {wanted}), precision {precision:.3f} ({right} of {replaced})")
    assert recall >= 0.95 and precision >= 0.9, "\n".join(faults)


@pytest.mark.slow
def test_a_row_takes_less_than_a_hundred_splits_into_words() -> None:
    """Prose and code, 2,200 characters each, with a labelled text in each."""
    rng, sources = random.Random(0), [inspect.getsource(module) for module in (argparse, email.message, json.decoder)]
    labelled = [case.text for case in read_cases("cases")]
    scrub("+1 415 555 2671")  # the tables of the first call
    rows = []
    for _ in range(50):
        source = rng.choice(sources)
        start = rng.randrange(len(source) - 2200)
        rows.append(f"{source[start : start + 2200]} {rng.choice(labelled)}")

    def scrubbing() -> None:
        for row in rows:
            scrub(row)

    def splitting() -> None:
        for row in rows * 100:
            WORDS.findall(row)

    assert any(time_s(scrubbing) < time_s(splitting) for _ in range(ATTEMPTS))


@pytest.mark.slow
def test_scrubbing_twice_equals_scrubbing_once_whatever_stands_together() -> None:
    rng = random.Random(0)
    parts = [*"aB10-.@+()[]:=é \n", "4111", "com", "sk-", "eyJ", "GB82", "WEST", "x1234567890123456", "Bearer "]
    parts += [
        "password: ", "api_key=", "tel ", "a1b2c3d4", " (at) ", " dot ", "\u200b", "4 1 1 1 1 1 1 ", "://", "-u ", "00",
    ]  # fmt: skip
    parts += ["a@b.co", "10.1.2.3", "+14155552671", "2001:db8::1", "4111111111111111", "020 7946 0958"]
    for _ in range(5_000):
        text = "".join(rng.choices(parts, k=rng.randint(1, 14)))
        once = scrub(text)
        assert scrub(once) == once, text


ATTACKS = ["a", "a.b@", "@", "b.", "eyJ-", "eyJaaaaa.", "+1", "1 ", "1", "1234 ", "0123:", "abcd:", "1.", "AB12 ", "("]
ATTACKS += ["Bearer ", "sk-", "(0123) ", "+1 ( ", "1-1-", "@1.1", "2001:db8::", "eyJaaaaa.eyJ", "a@b.b-", "AB12 CD34 "]
ATTACKS += [
    "password: ", "token=", "call 2125550123 ", "tel 1 ", "Authorization: ", "://a:", "-u a:", "a ", "4 ", "x (at) ",
    "-----BEGIN PRIVATE KEY-----", "A" * 64 + "\n", "\u200b", "DE89 ", "4111 1111 1111 ", "a at b dot ", "a.b-", "[IP]",
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("attack", ATTACKS)
def test_time_grows_linearly_on_repetition(attack: str) -> None:
    text = (attack * 32_000)[:32_000]

    def both(end: int) -> None:
        scrub(text[:end])
        scrub("a@" + text[:end])

    assert grows_linearly(lambda: both(8_000), lambda: both(32_000))
