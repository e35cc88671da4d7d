import ast
from collections.abc import Callable
from pathlib import Path

import pytest

from models.sources import Prompt
from models.sources.stdlib_code import Params, _mine, _Mined, _prompt

SOURCE = '''
import sys

def area(width: float, *, height=1.0) -> float:
    """Return the area of a rectangle.

    Both in metres.
    """
    return width * height

def short():
    """Too short."""

def bare(): ...

class Shape:
    """A class's own docstring makes no prompt."""

    async def draw(self, /, canvas):
        """Draw onto the canvas, then wait for it."""
        def inner():
            """Functions within functions make no prompts."""
'''


@pytest.fixture
def functions(tmp_path: Path) -> list[_Mined]:
    package = tmp_path / "shapes"
    package.mkdir()
    (package / "plane.py").write_text(SOURCE)
    return list(_mine(tmp_path, package / "plane.py", Params()))


def test_a_document_is_the_whole_function_without_its_indentation(functions: list[_Mined]) -> None:
    area, draw = (one.source for one in functions)
    assert area.startswith('def area(width: float, *, height=1.0) -> float:\n    """Return the area')
    assert area.endswith("    return width * height\n")
    assert draw.startswith("async def draw(self, /, canvas):\n    ")
    assert "def inner():" in draw


def test_a_form_feed_or_another_encoding_moves_no_line(tmp_path: Path) -> None:
    text = '# -*- coding: latin-1 -*-\n# \xe9\n\x0c\ndef f():\n    """Say what is \xe9 here at length."""\n'
    (tmp_path / "old.py").write_bytes(text.encode("latin-1"))
    (one,) = _mine(tmp_path, tmp_path / "old.py", Params())
    assert one.source == 'def f():\n    """Say what is \xe9 here at length."""\n'


def test_a_prompt_of_functions_and_methods_holds_signature_and_docstring_and_no_body(functions: list[_Mined]) -> None:
    area, draw = map(_prompt, functions)
    assert area.messages[0].content == (
        "Write the Python function below.\n```python\n"
        "def area(width: float, *, height=1.0) -> float:\n"
        '    """Return the area of a rectangle.\n\n    Both in metres."""\n```'
    )
    assert "async def draw(self, /, canvas):" in draw.messages[0].content
    assert area.group == draw.group == "stdlib:shapes"


def test_a_long_docstring_is_cut(tmp_path: Path) -> None:
    (tmp_path / "long.py").write_text(f'def f():\n    """{"word " * 300}"""\n')
    (prompt,) = map(_prompt, _mine(tmp_path, tmp_path / "long.py", Params(max_chars=100)))
    assert prompt.messages[0].content.count("word") == 20


@pytest.fixture
def library(default_stream: Callable[[str], list[Prompt]]) -> list[Prompt]:
    return default_stream("stdlib_code")


@pytest.mark.slow
def test_the_library_gives_thousands_of_prompts_and_tests_and_installed_packages_none(library: list[Prompt]) -> None:
    assert len(library) > 4000
    groups = {prompt.group.removeprefix("stdlib:") for prompt in library}
    assert {"asyncio", "json", "textwrap"} <= groups
    assert not groups & {"test", "idlelib", "site-packages", "encodings", "pydantic", "torch"}


@pytest.mark.slow
def test_every_prompt_is_python_once_a_body_is_there(library: list[Prompt]) -> None:
    for prompt in library[::50]:
        text = prompt.messages[0].content
        ast.parse(text.removeprefix("Write the Python function below.\n```python\n").removesuffix("\n```"))
