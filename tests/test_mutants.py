"""What code does is changed and not what it tells, every drawn mutant is Python, and the tests to catch it exist."""

import ast
from pathlib import Path

import pytest

from tests.imports import ROOT
from tests.mutants import TESTS, draw, mutants

TOY = """
def ages(limit: int, *, log=None):
    \"\"\"Return 0.\"\"\"
    if log:
        log.info("at most", limit + 1)
    return [age for age in range(limit) if age < 3]
"""


def test_what_code_does_is_changed_and_what_it_tells_is_not(tmp_path: Path) -> None:
    (tmp_path / "toy.py").write_text(TOY)
    names = [mutant.name.removeprefix("toy ages: ").partition("  # ")[0] for mutant in mutants("toy", tmp_path)]
    assert sorted(names) == [
        "3 → 4",
        "age < 3 → age <= 3",
        "age < 3 → not age < 3",
        "log → not log",
        "return [age for age in range(limit) if age < 3] → return None",
    ]


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
