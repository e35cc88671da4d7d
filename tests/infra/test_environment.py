"""A benchmark's home is its own, whatever the process's environment says."""

import os
from pathlib import Path

from infra.environment import enter_home, environment_of
from infra.settings import load_settings


def test_nothing_of_a_benchmark_lies_outside_its_home(tmp_path, monkeypatch):
    monkeypatch.setenv("REDRAFT_HOME", str(tmp_path / "served"))
    monkeypatch.setenv("REDRAFT_QUERYLOG", str(tmp_path / "served" / "queries.db"))
    monkeypatch.setenv("REDRAFT_API_KEYS", "a-key-of-the-service")
    monkeypatch.setenv("REDRAFT_HOST", "0.0.0.0")
    settings = load_settings(environment_of(tmp_path / "own"))
    for path in (settings.home, settings.querylog, settings.cache, settings.artifacts):
        assert path.is_relative_to(tmp_path / "own")
    assert str(tmp_path / "own") in settings.mlflow_uri
    assert (settings.api_keys, settings.host) == ((), "127.0.0.1")


def test_a_child_gets_the_libraries_folders_of_its_own_home(tmp_path, monkeypatch):
    monkeypatch.setenv("PREFECT_HOME", "elsewhere")
    environment = environment_of(tmp_path)
    assert environment["REDRAFT_HOME"] == str(tmp_path)
    assert Path(environment["PREFECT_HOME"]).is_relative_to(tmp_path)
    assert environment["MLFLOW_TRACKING_URI"] == f"sqlite:///{tmp_path / 'mlflow.db'}"


def test_entering_a_home_changes_the_process(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "environ", os.environ.copy())
    os.environ["REDRAFT_CACHE"] = "elsewhere"
    settings = enter_home(tmp_path / "own")
    assert settings.home.is_dir()
    assert "REDRAFT_CACHE" not in os.environ
    assert os.environ["REDRAFT_HOME"] == str(tmp_path / "own")
