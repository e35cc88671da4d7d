"""Documents are short, their links and pictures are there, and the commands and files that they name exist."""

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.references import REFERENCES, commands

ROOT = Path(__file__).parents[1]
ROOMS = ("docker", "flows", "infra", "models", "services", "tasks", "tests")
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(file for room in (*ROOMS, "docs") for file in (ROOT / room).rglob("*.md"))])
GENERATED = [ROOT / name for name in REFERENCES]
WRITTEN = [file for file in DOCUMENTS if file not in GENERATED]
RESULTS = sorted((ROOT / "docs" / "results").glob("*.md"))
# What is told of earlier commits names files and commands of theirs.
PAST = [*RESULTS, ROOT / "CHANGELOG.md"]
# Tests are named by their paths below tests/.
TOLD_FROM = (ROOT, ROOT / "tests")
PICTURE = ROOT / "docs" / "architecture.svg"
MOST_BYTES_OF_PNG = 1_000_000


def words(*files: Path) -> int:
    """Return how many words files have, counted as `wc -w` does."""
    return sum(len(file.read_text(encoding="utf-8").split()) for file in files)


def test_documents_are_short_enough_to_be_read() -> None:
    assert words(ROOT / "README.md") <= 800
    assert words(*RESULTS) <= 5_000
    assert words(*WRITTEN) <= 18_000


@pytest.mark.parametrize("room", ROOMS)
def test_every_folder_says_what_lives_there_and_how_to_add_one(room: str) -> None:
    text = (ROOT / room / "README.md").read_text(encoding="utf-8")
    assert text.startswith(f"# {room}/\n")
    assert "- **Add" in text
    assert len(text.split()) <= 150


def test_the_glossary_has_a_sentence_for_each_of_forty_terms_at_most() -> None:
    lines = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8").splitlines()
    _, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    assert 20 <= len(rows) <= 40
    assert len({term for term, _ in rows}) == len(rows)
    assert [meaning for _, meaning in rows if not re.fullmatch(r"[^.]+(\d\.\d[^.]*)?\.", meaning)] == []


def test_a_release_has_ten_lines_of_changes_at_most() -> None:
    _, *releases = re.split(r"^## ", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert [release.split()[0] for release in releases] == ["0.2.0", "0.1.0"]
    assert all(1 <= len(re.findall(r"^- ", release, re.MULTILINE)) <= 10 for release in releases)


def test_links_lead_to_a_file_and_a_heading() -> None:
    for document in DOCUMENTS:
        for link in re.findall(r"\]\((?!https?:)([^)\s]+)\)", document.read_text(encoding="utf-8")):
            path, _, heading = link.partition("#")
            file = (document.parent / path).resolve() if path else document
            assert file.exists(), (document, link)
            if heading:
                assert heading in headings(file), (document, link)


def test_every_picture_is_shown_and_pictures_are_small() -> None:
    drawn = [*ROOT.glob("docs/**/*.png"), *ROOT.glob("docs/**/*.svg"), *ROOT.glob("tests/**/*.png")]
    shown = {
        (document.parent / link).resolve()
        for document in DOCUMENTS
        for link in re.findall(r"!\[[^\]]*\]\(([^)\s]+)\)", document.read_text(encoding="utf-8"))
    }
    assert {*drawn} <= shown
    assert sum(file.stat().st_size for file in drawn if file.suffix == ".png") < MOST_BYTES_OF_PNG


def test_each_row_of_what_is_protected_names_tests_that_exist() -> None:
    lines = (ROOT / "docs" / "security.md").read_text(encoding="utf-8").splitlines()
    _, _, *rows = [line.split("|") for line in lines if line.startswith("|")]
    assert len(rows) > 20
    for _, asset, _, _, shown, _, _ in rows:
        tests = re.findall("`([^`]+)`", shown)
        assert tests, asset
        assert [name for name in tests if not (ROOT / "tests" / name).exists()] == []


def test_commands_named_in_a_document_exist() -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    programs = {"redraft": {path[0] for path, _ in commands()}, "make": {*targets}}
    for document in DOCUMENTS:
        text = document.read_text(encoding="utf-8")
        code = "\n".join(re.findall(r"^```.*?^```", text, re.MULTILINE | re.DOTALL))
        for program, known in programs.items():
            named = re.findall(rf"`{program} ([a-z][a-z-]+)", text)
            named += re.findall(rf"^{program} ([a-z][a-z-]+)", code, re.MULTILINE)
            assert {*named} <= known, document
        for module in re.findall(r"python -m ((?:flows|infra|models|services|tasks|tests)[a-z_.]*)", text):
            assert find_spec(module.rstrip(".")) is not None, (document, module)


def test_files_named_in_a_document_exist() -> None:
    for document in (file for file in WRITTEN if file not in PAST):
        named = named_files(document.read_text(encoding="utf-8"))
        assert [path for path in named if not any([*folder.glob(path)] for folder in TOLD_FROM)] == [], document


def test_the_picture_of_the_way_names_files_that_exist_and_the_page_names_them_too() -> None:
    named = named_files(PICTURE.read_text(encoding="utf-8"))
    page = PICTURE.with_suffix(".md").read_text(encoding="utf-8")
    assert len(named) > 10
    assert [path for path in named if not (ROOT / path).is_file()] == []
    assert [path for path in named if path not in page] == []


@pytest.mark.slow
def test_the_pages_build_without_a_warning(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir"]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    subprocess.run([*command, str(tmp_path / "site")], cwd=ROOT, env=environment, check=True)
    assert (tmp_path / "site" / "results" / "index.html").is_file()


def named_files(text: str) -> list[str]:
    """Return the paths of files and folders below a room that a text names; FAMILY and NAME stand for any."""
    paths = re.findall(rf"\b(?:{'|'.join((*ROOMS, 'docs'))})(?:/[\w*-]+)*/(?:[\w*-]+\.[a-z]+)?(?![\w/…])", text)
    return [path.replace("FAMILY", "*").replace("NAME", "*") for path in paths]


def headings(file: Path) -> set[str]:
    """Return the anchors of a document's headings."""
    found = re.findall(r"^#+ (.+)$", file.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in found}
