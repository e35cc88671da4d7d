"""A fault that a test reaches is caught, one that no test reaches survives, and every drawn mutant is Python."""

import ast
from pathlib import Path

import pytest

from tests.imports import ROOT
from tests.mutants import TESTS, draw, mutants, try_mutant

TOY = """
def ages(limit: int, *, log=None):
    \"\"\"Return 0.\"\"\"
    if log:
        log.info("at most", limit + 1)
    return [age for age in range(limit) if age < 3]
"""
TEST = """
from toy import ages

def test_few():
    assert ages(2) == [0, 1]
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    root = tmp_path / "tree"
    (root / "tests").mkdir(parents=True)
    (root / "toy.py").write_text(TOY)
    (root / "tests" / "test_toy.py").write_text(TEST)
    return root


def test_what_code_does_is_changed_and_what_it_tells_is_not(tree: Path) -> None:
    names = [mutant.name.removeprefix("toy ages: ").partition("  # ")[0] for mutant in mutants("toy", tree)]
    assert sorted(names) == [
        "3 → 4",
        "age < 3 → age <= 3",
        "age < 3 → not age < 3",
        "log → not log",
        "return [age for age in range(limit) if age < 3] → return None",
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "outcome"), [("age < 3 → age <= 3", "survived"), ("age < 3 → not age < 3", "killed")]
)
def test_a_mutant_survives_where_no_test_fails(tree: Path, change: str, outcome: str) -> None:
    (mutant,) = (mutant for mutant in mutants("toy", tree) if f" {change}  " in mutant.name)
    assert try_mutant(mutant, ["test_toy"], tree) == outcome
    assert (tree / "toy.py").read_text() == TOY


@pytest.mark.slow
def test_mutants_are_drawn_by_seed_one_of_each_module_first() -> None:
    drawn = draw(TESTS, len(TESTS), 0, ROOT)
    assert {mutant.module for mutant in drawn} == TESTS.keys()
    assert draw(TESTS, 3, 0, ROOT) == drawn[:3]
    assert draw(TESTS, 3, 1, ROOT) != drawn[:3]
    for mutant in drawn:
        source = (ROOT / f"{mutant.module}.py").read_bytes()
        assert ast.dump(ast.parse(mutant.text(source))) != ast.dump(ast.parse(source)), mutant


def test_the_tests_of_the_modules_exist() -> None:
    named = {name for names in TESTS.values() for name in names}
    assert [name for name in sorted(named) if not (ROOT / "tests" / f"{name}.py").is_file()] == []
