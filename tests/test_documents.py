"""Documents are short where they must be, their links lead somewhere, and the commands that they name exist."""

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.references import commands

ROOT = Path(__file__).parents[1]
ROOMS = ("docker", "flows", "infra", "models", "services", "tasks", "tests")
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(file for room in ROOMS for file in (ROOT / room).rglob("*.md"))])


def test_the_front_page_is_read_in_five_minutes() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) <= 900


@pytest.mark.parametrize("room", ROOMS)
def test_every_folder_says_what_lives_there_and_how_to_add_one(room: str) -> None:
    text = (ROOT / room / "README.md").read_text(encoding="utf-8")
    assert text.startswith(f"# {room}/\n")
    assert "- **Add" in text
    assert len(text.split()) <= 500  # a page: what is longer has a file of its own


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda file: str(file.relative_to(ROOT)))
def test_links_lead_to_a_file_and_a_heading(document: Path) -> None:
    for link in re.findall(r"\]\((?!https?:)([^)\s]+)\)", document.read_text(encoding="utf-8")):
        path, _, heading = link.partition("#")
        file = (document.parent / path).resolve() if path else document
        assert file.exists(), link
        if heading:
            assert heading in headings(file), link


def test_each_row_of_what_is_protected_names_tests_that_exist() -> None:
    lines = (ROOT / "SECURITY.md").read_text(encoding="utf-8").splitlines()
    _, _, *rows = [line.split("|") for line in lines if line.startswith("|")]
    assert len(rows) > 20
    for _, asset, _, _, shown, _, _ in rows:
        tests = re.findall("`((?!make )[^`]+)`", shown)
        assert tests, asset
        assert [name for name in tests if not (ROOT / "tests" / name).exists()] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda file: str(file.relative_to(ROOT)))
def test_commands_named_in_a_document_exist(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    code = "\n".join(re.findall(r"^```.*?^```", text, re.MULTILINE | re.DOTALL))
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    for program, known in (("redraft", {path[0] for path, _ in commands()}), ("make", {*targets})):
        named = re.findall(rf"`{program} ([a-z][a-z-]+)", text)
        named += re.findall(rf"^{program} ([a-z][a-z-]+)", code, re.MULTILINE)
        assert {*named} <= known
    for module in re.findall(r"python -m ((?:flows|infra|models|services|tasks|tests)[a-z_.]*)", text):
        assert find_spec(module.rstrip(".")) is not None, module


def headings(file: Path) -> set[str]:
    """Return the anchors of a document's headings."""
    found = re.findall(r"^#+ (.+)$", file.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in found}
