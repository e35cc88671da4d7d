from collections.abc import Iterator
from pathlib import Path

import pytest

from infra.querylog import QueryLog
from tests.infra.rows import content_of, erase, row

SECRET, OTHER = b"s" * 32, b"t" * 32
GROUP = "9" * 64


@pytest.fixture
def log(place: Path | str) -> Iterator[QueryLog]:
    log = QueryLog(place)
    rows = [row(f"a{number}", subject=f"s{number}") for number in range(3)]
    added = [{"prompt_ids": [0, 7], "group": GROUP}, {"prompt_ids": [1, 7]}, {"prompt_ids": [2, 7]}]
    log.append([one.model_copy(update=change) for one, change in zip(rows, added, strict=True)])
    log.append([row("b1"), row("b2", consent="metadata")])  # neither has tokens
    yield log
    log.close()


def test_each_row_with_tokens_is_sketched_once(log: QueryLog) -> None:
    sketches = log.sketches
    assert sketches.missing(SECRET) == [(1, [0, 7]), (2, [1, 7]), (3, [2, 7])]
    sketches.keep(SECRET, [(1, b"turn", b"grams"), (3, b"other", b"")])
    assert [seq for seq, _ in sketches.missing(SECRET)] == [2]
    assert [(one.seq, one.domain, one.group, one.turn, one.grams) for one in sketches.read(SECRET)] == [
        (1, "chat", GROUP, b"turn", b"grams"),
        (3, "chat", None, b"other", b""),
    ]


def test_under_another_secret_all_are_made_anew(log: QueryLog) -> None:
    sketches = log.sketches
    sketches.keep(SECRET, [(1, b"turn", b"grams")])
    assert [seq for seq, _ in sketches.missing(OTHER)] == [1, 2, 3]
    assert sketches.read(OTHER) == []
    sketches.keep(OTHER, [(1, b"new", b"")])
    assert (sketches.read(SECRET), sketches.read(OTHER)[0].turn) == ([], b"new")


def test_a_sketch_goes_with_its_row_and_none_is_made_of_an_erased_one(log: QueryLog) -> None:
    sketches = log.sketches
    sketches.keep(SECRET, [(1, b"a secret turn", b"grams"), (2, b"turn", b"grams")])
    assert erase(log, "s0").rows == 1
    sketches.keep(SECRET, [(1, b"a secret turn", b"grams")])
    assert [one.seq for one in sketches.read(SECRET)] == [2]
    erase(log, "s0")
    left = content_of(log)
    assert b"a secret turn" not in left
    assert GROUP.encode() not in left
