"""What other distributions brought along is found without importing them."""

from pathlib import Path

import pytest

from infra.installed import openmp_preload, version_of


def test_the_openmp_library_is_preloaded_first_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    library = openmp_preload()["LD_PRELOAD"]
    assert Path(library).is_file()
    monkeypatch.setenv("LD_PRELOAD", f"/other.so:{library}")
    assert openmp_preload() == {"LD_PRELOAD": f"{library}:/other.so"}


def test_what_is_not_installed_has_no_version() -> None:
    assert version_of("no-such-distribution") is None
    assert version_of("ray") is not None
