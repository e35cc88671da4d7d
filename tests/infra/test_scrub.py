import argparse
import email.message
import inspect
import json.decoder
import random
import re

import pytest

from infra.scrub import scrub
from tests.growth import ATTEMPTS, grows_linearly, time_s
from tests.infra.scrub_cases import judge, read_cases

WORDS = re.compile(r"\w+|\s+|[^\w\s]")


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


def test_a_third_of_the_labelled_texts_is_held_out_and_half_of_all_hold_a_secret() -> None:
    cases, held_out = read_cases("cases"), read_cases("held_out")
    both = cases + held_out
    assert len(both) >= 300 and len(both) * 0.3 < len(held_out) < len(both) * 0.37
    assert len(both) * 0.4 < sum(bool(case.secrets) for case in both) < len(both) * 0.65
    assert not {case.text for case in cases} & {case.text for case in held_out}


@pytest.mark.parametrize("name", ["cases", "held_out"])
def test_nearly_all_secrets_of_labelled_texts_go_and_nearly_nothing_else(name: str) -> None:
    cases = read_cases(name)
    score, faults = judge(cases, scrub)
    print(f"\n{name}: {len(cases)} texts, recall {score.recall:.3f} ({score.found} of {score.wanted}),", end=" ")
    print(f"precision {score.precision:.3f} ({score.right} of {score.replaced})")
    assert score.recall >= 0.95 and score.precision >= 0.9, "\n".join(faults)


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
    for _ in range(10_000):
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
