"""A text is found again in whatever form it was copied, and what it is overwritten with breaks nothing."""

import json
import random

import pytest

from infra.erase.search import WIDTH, Search, redacted
from tests.growth import grows_linearly
from tests.infra.erase.planted import MARK, planted_row

MINE, OTHER = planted_row(0), planted_row(1, "somebody")


@pytest.mark.parametrize(
    "form",
    [
        lambda text: text,
        json.dumps,
        lambda text: json.dumps(text, ensure_ascii=False),
        lambda text: json.dumps(json.dumps({"text": text})),
        lambda text: text[7 : 7 + WIDTH],
    ],
)
def test_a_text_is_found_in_each_form_and_where_24_bytes_of_it_are_quoted(form) -> None:
    content = f"before|{form(MARK)}|after".encode()
    changed = redacted(content, Search([MINE]).spans(content))
    assert (len(changed), changed[:7], changed[-6:]) == (len(content), b"before|", b"|after")
    assert b"7391" not in changed and b"vermilion" not in changed
    changed.decode()


def test_token_ids_are_found_and_lists_stay_lists() -> None:
    for separators in ((", ", ": "), (",", ":")):
        content = json.dumps({"ids": MINE.prompt_ids, "next": [1, 2, 3]}, separators=separators).encode()
        assert json.loads(redacted(content, Search([MINE]).spans(content))) == {"ids": [0] * 40, "next": [1, 2, 3]}


def test_json_stays_json_wherever_a_quote_of_a_text_begins_and_ends() -> None:
    rng, search = random.Random(0), Search([MINE])
    text = MINE.completion or ""
    for _ in range(500):
        start = rng.randrange(len(text) - WIDTH)
        part = text[start : start + rng.randint(WIDTH, 60)]
        value = {"kept": 'a "quoted" word\n', "quote": f'\\{part}"\\', "ids": [7]}
        for content in (json.dumps(value), json.dumps(value, ensure_ascii=False), json.dumps(json.dumps(value))):
            changed = json.loads(redacted(content.encode(), search.spans(content.encode())))
            changed = json.loads(changed) if isinstance(changed, str) else changed
            assert (changed["kept"], changed["ids"]) == (value["kept"], [7])


def test_what_others_said_too_is_nobodys_own() -> None:
    content = (OTHER.prompt or "").encode()
    assert Search([MINE], [OTHER]).spans(content) == []
    assert Search([OTHER], []).spans(content) != []
    assert Search([], []).spans(content) == []


@pytest.mark.slow
def test_time_grows_linearly_and_a_place_between_two_pieces_is_found() -> None:
    from infra.erase import search as module

    filler = random.Random(0).randbytes(2 * module.CHUNK_BYTES)
    place = module.CHUNK_BYTES - 10
    content = filler[:place] + MARK.encode() + filler[place:]
    search = Search([MINE])
    assert search.spans(content) == [(place, place + len(MARK.encode()))]
    quarter = filler[: len(filler) // 4]
    assert grows_linearly(lambda: search.spans(quarter), lambda: search.spans(filler))
