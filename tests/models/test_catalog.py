"""The directory is the registry."""

import subprocess
import sys
from pathlib import Path

import pytest

from models import catalog


def test_names_lists_the_files_of_a_family() -> None:
    assert {"greedy", "rejection"} <= set(catalog.names("verify"))
    assert {"chitchat", "dataset", "stdlib_code", "synthetic"} <= set(catalog.names("sources"))
    assert not [name for name in catalog.names("sources") if name.startswith("_")]


def test_a_package_in_a_family_is_a_name_and_a_private_file_is_none(tmp_path, monkeypatch) -> None:
    for path in ("engines/__init__.py", "engines/torch.py", "engines/_shared.py", "engines/vllm/__init__.py"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).touch()
    monkeypatch.setattr(catalog, "_ROOT", tmp_path)
    assert catalog.families.__wrapped__() == ["engines"]
    assert catalog.names.__wrapped__("engines") == ["torch", "vllm"]


@pytest.mark.parametrize("family", ["verfy", "catalog", "", "../models", "verify.greedy"])
def test_an_unknown_family_is_refused(family: str) -> None:
    with pytest.raises(ValueError, match="no family"):
        catalog.names(family)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("gredy", r'"gredy" in verify \(did you mean "greedy"\?\); there are: .*rejection'),
        *((name, f'"{name}"') for name in ("", "../gate", "greedy.Params", "__init__")),
    ],
)
def test_a_name_that_is_no_file_of_the_family_is_refused_with_the_nearest_one(name: str, told: str) -> None:
    with pytest.raises(ValueError, match=f"no method {told}"):
        catalog.load("verify", name)


def test_a_method_is_parsed_from_its_table_by_its_own_name() -> None:
    params = catalog.parse("sources", {"name": "synthetic", "count": 3})
    assert params == catalog.load("sources", "synthetic").Params(count=3)
    for family in ("sources", "verify"):
        for name in catalog.names(family):
            assert catalog.load(family, name).Params.model_fields["name"].default == name


@pytest.mark.parametrize("table", [{}, {"count": 3}, {"name": 7}])
def test_parse_needs_a_name(table: dict) -> None:
    with pytest.raises(ValueError, match='sources: key "name" must be a method'):
        catalog.parse("sources", table)


def test_listing_a_family_imports_no_torch() -> None:
    code = "import sys; from models import catalog; catalog.names('verify'); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], check=True)
