"""The references in docs/ say what the code says."""

import pytest

from tests import references


def written(name: str) -> str:
    return (references.ROOT / name).read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.parametrize("name", references.REFERENCES)
def test_a_reference_is_what_the_code_says(name: str) -> None:
    assert written(name) == references.REFERENCES[name](), f"{name} is out of date; run: make references"


def test_the_errors_of_the_service_are_found() -> None:
    assert ("413", "`body_too_large`") in {(status, code) for status, code, _ in references.request_errors()}


def test_every_key_of_a_recipe_says_what_it_means() -> None:
    assert references.undocumented() == []


@pytest.mark.parametrize("name", references.REFERENCES)
def test_every_row_of_a_table_is_one_line_and_has_no_empty_cell(name: str) -> None:
    rows = [line for line in written(name).splitlines() if line.startswith("|")]
    assert rows
    assert all(row.endswith("|") for row in rows)
    assert not any("|  |" in row for row in rows)
