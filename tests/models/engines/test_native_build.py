"""Operators in C++ are compiled once, and a library is there whole or not at all."""

from pathlib import Path

import pytest
import torch

from models.engines.vllm import native_build

SOURCE = """
#include <torch/library.h>

TORCH_LIBRARY(NAME, library) { library.def("seven() -> int", [] { return int64_t{7}; }); }
"""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    file = tmp_path / "seven.cpp"
    file.write_text(SOURCE.replace("NAME", f"redraft_{tmp_path.name}"))
    return file


@pytest.mark.engine
def test_a_library_is_compiled_once(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    native_build.load(source, tmp_path / "kept")
    assert getattr(torch.ops, f"redraft_{tmp_path.name}").seven() == 7
    monkeypatch.setenv("CXX", "no-compiler")
    native_build.load(source, tmp_path / "kept")
    assert [file.suffix for file in (tmp_path / "kept").iterdir()] == [".so"]


@pytest.mark.engine
def test_homes_share_a_library_and_one_has_its_own_where_nothing_can_be_shared(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared, own = tmp_path / "shared", tmp_path / "own"
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(own))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(shared))
    assert native_build.is_loaded(source, "slow")
    assert [len(list(folder.glob("**/*.so"))) for folder in (shared, own)] == [1, 0]
    (tmp_path / "file").touch()
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "file"))
    other = source.with_name("other.cpp")
    other.write_text(SOURCE.replace("NAME", f"redraft_other_{tmp_path.name}"))
    assert native_build.is_loaded(other, "slow")
    assert len(list(own.glob("*.so"))) == 1


def test_what_does_not_compile_is_told_and_leaves_nothing(source: Path, tmp_path: Path) -> None:
    source.write_text("int seven() { return }")
    with pytest.raises(ValueError, match="expected primary-expression"):
        native_build.load(source, tmp_path / "kept")
    assert not list((tmp_path / "kept").iterdir())


def test_without_a_compiler_its_name_is_told(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-compiler")
    with pytest.raises(OSError, match="no-compiler"):
        native_build.load(source, tmp_path / "kept")


def test_another_processor_compiles_anew(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = native_build._digest(source, native_build.FLAGS)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx2": False})
    assert native_build._digest(source, native_build.FLAGS) != here
