"""The way from a request to the draft that it trains gets no longer, and the script that measures it misses nothing."""

import json
from pathlib import Path

import pytest

from tests.imports import ROOMS, ROOT
from tests.way import FIGURES, REFRESH, SERVING, Tree, measure

# Whatever they bring in is looked up by a name that a recipe, a command or a template gives.
LOOK_UP = {
    *("flows/bench.py", "infra/auth_middleware.py", "models/catalog.py", "models/together.py"),
    *("tasks/measure/compare_methods.py", "tasks/measure/comparisons/__init__.py"),
}


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    """Return a product of a few files, each named in another manner."""
    files = {
        "infra/__init__.py": "",
        "infra/a.py": "def later():\n    from infra.b import thing\n",
        "infra/b.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import infra.deep.c\n",
        "infra/deep/__init__.py": "from .d import e\n",
        "infra/deep/c.py": "from . import d\nfrom .. import f\n",
        "infra/deep/d.py": 'e = ["-m", "infra.g"]\n',
        "infra/f.py": 'PAGE = "page.html"\n',
        "infra/page.html": '{% extends "frame.html" %}',
        "infra/frame.html": "",
        "infra/g.py": 'from pathlib import Path\nSOURCE = Path(__file__).with_suffix(".cpp")\nIN = "infra.h.Name"\n',
        "infra/g.cpp": "",
        "infra/h.py": "",
        "infra/unused.py": "import infra.a\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return Tree(tmp_path)


def test_whatever_a_file_names_is_on_its_way(tree: Tree) -> None:
    reached = {str(file.relative_to(tree.root / "infra")) for file in tree.reached(["infra.a"], tree.graph())}
    assert reached == {
        *("__init__.py", "a.py", "b.py", "deep/__init__.py", "deep/c.py", "deep/d.py"),
        *("f.py", "page.html", "frame.html", "g.py", "g.cpp", "h.py"),
    }


def test_the_way_is_no_longer_than_it_is_allowed_to_be() -> None:
    allowed = json.loads(FIGURES.read_text())
    for way, size in measure().items():
        assert all(size[what] <= allowed[way][what] for what in ("files", "lines")), f"{way}: {size}, {allowed[way]}"


def test_the_starting_points_exist() -> None:
    assert {*SERVING, *REFRESH} <= Tree(ROOT).modules.keys()


def test_modules_are_looked_up_by_name_only_where_that_is_known() -> None:
    files = [file for room in ROOMS for file in (ROOT / room).rglob("*.py") if "import_module" in file.read_text()]
    assert {str(file.relative_to(ROOT)) for file in files} <= LOOK_UP
