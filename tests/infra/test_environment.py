"""A benchmark's home is its own, whatever the process's environment says."""

import os
from pathlib import Path

from infra.environment import enter_home, environment_of
from infra.settings import load_settings


def test_nothing_of_a_benchmark_or_of_its_children_lies_outside_its_home(tmp_path, monkeypatch):
    monkeypatch.setenv("REDRAFT_HOME", str(tmp_path / "served"))
    monkeypatch.setenv("REDRAFT_QUERYLOG", str(tmp_path / "served" / "queries.db"))
    monkeypatch.setenv("REDRAFT_API_KEYS", "a-key-of-the-service")
    monkeypatch.setenv("REDRAFT_HOST", "0.0.0.0")
    monkeypatch.setenv("PREFECT_HOME", "elsewhere")
    own = tmp_path / "own"
    settings = load_settings(environment := environment_of(own))
    folders = (settings.home, settings.querylog, settings.cache, settings.artifacts, Path(environment["PREFECT_HOME"]))
    assert all(path.is_relative_to(own) for path in folders)
    assert settings.mlflow_uri == environment["MLFLOW_TRACKING_URI"] == f"sqlite:///{own / 'mlflow.db'}"
    assert (environment["REDRAFT_HOME"], settings.api_keys, settings.host) == (str(own), (), "127.0.0.1")


def test_entering_a_home_changes_the_process(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "environ", os.environ.copy())
    os.environ["REDRAFT_CACHE"] = "elsewhere"
    settings = enter_home(tmp_path / "own")
    assert settings.home.is_dir()
    assert "REDRAFT_CACHE" not in os.environ
    assert os.environ["REDRAFT_HOME"] == str(tmp_path / "own")
