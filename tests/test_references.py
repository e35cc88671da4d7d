"""The references in docs/ say what the code says."""

import pytest

from tests import references


@pytest.mark.slow
@pytest.mark.parametrize("name", references.REFERENCES)
def test_a_reference_is_what_the_code_says(name: str) -> None:
    written = (references.ROOT / name).read_text(encoding="utf-8")
    assert written == references.REFERENCES[name](), f"{name} is out of date; run: make references"


def test_the_errors_of_the_service_are_found() -> None:
    assert ("413", "`body_too_large`") in {(status, code) for status, code, _ in references.request_errors()}


def test_every_key_of_a_recipe_says_what_it_means() -> None:
    assert references.undocumented() == []


def test_every_route_and_option_says_what_it_does() -> None:
    for name in ("api", "cli", "metrics"):
        file = references.ROOT / "docs" / "reference" / f"{name}.md"
        assert "|  |" not in file.read_text(encoding="utf-8"), name


@pytest.mark.slow
@pytest.mark.parametrize("name", references.REFERENCES)
def test_every_row_of_a_table_is_one_line(name: str) -> None:
    rows = [line for line in references.REFERENCES[name]().splitlines() if line.startswith("|")]
    assert rows
    assert all(row.endswith("|") for row in rows)
