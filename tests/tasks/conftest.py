"""Homes of their own for tests of tasks."""

import shutil
from pathlib import Path

import pytest

from infra.artifacts import Artifact
from infra.home import SECRET_BYTES, SPLIT_KEY
from infra.querylog import QueryLog
from infra.registry import Registry, open_registry
from infra.settings import load_settings
from tests.tasks.made import target_files


@pytest.fixture
def home(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home with an empty registry, which settings find."""
    made = tmp_path / "home"
    made.mkdir(mode=0o700)
    shutil.copy(store, made)
    monkeypatch.setenv("REDRAFT_HOME", str(made))
    return made


@pytest.fixture
def log(home: Path) -> QueryLog:
    """The query log of the home, whose secret, and so every split, is the same each time."""
    (home / SPLIT_KEY).touch(0o600)
    (home / SPLIT_KEY).write_bytes(bytes(SECRET_BYTES))
    return QueryLog(load_settings().querylog)


@pytest.fixture
def registry(home: Path) -> Registry:
    return open_registry()


@pytest.fixture
def target(tiny_target: Path, tmp_path: Path) -> Artifact:
    """The tiny target as tasks hand it on."""
    return target_files(tiny_target, tmp_path / "target")
