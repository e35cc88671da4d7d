"""Documents are short where they must be, and their links lead somewhere."""

import re
from pathlib import Path

import pytest

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


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda file: str(file.relative_to(ROOT)))
def test_links_lead_to_a_file_and_a_heading(document: Path) -> None:
    for link in re.findall(r"\]\((?!https?:)([^)\s]+)\)", document.read_text(encoding="utf-8")):
        path, _, heading = link.partition("#")
        file = (document.parent / path).resolve() if path else document
        assert file.exists(), link
        if heading:
            assert heading in headings(file), link


def headings(file: Path) -> set[str]:
    """Return the anchors of a document's headings."""
    found = re.findall(r"^#+ (.+)$", file.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in found}
