from pathlib import Path
from typing import Any

import pytest
from alembic.runtime.migration import HeadMaintainer
from sqlalchemy import inspect

from infra.settings import Settings
from infra.store import Store
from tests.conftest import ODD_NAME


@pytest.fixture
def mlflow_store(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    (tmp_path / ODD_NAME).mkdir()
    monkeypatch.chdir(tmp_path)
    settings = Settings(home=tmp_path / ODD_NAME)
    (settings.home / "mlflow.db").write_bytes(store.read_bytes())
    return Store(settings.mlflow_uri, settings.artifacts)


def test_a_run_is_recorded_with_its_params_metrics_and_files(mlflow_store: Store, tmp_path: Path) -> None:
    figure = tmp_path / "figure.svg"
    figure.write_text("<svg/>")
    run_id = mlflow_store.record_run("gate", {"K": 3, "domains": ["chat"]}, {"gain": 0.5}, [figure])
    assert mlflow_store.recorded("gate") == [{"gain": 0.5}]
    assert mlflow_store.recorded("other") == []
    (stored,) = (tmp_path / ODD_NAME / "artifacts").rglob("figure.svg")
    assert stored.parts[-3] == run_id
    assert stored.read_text() == "<svg/>"
    assert {path.name for path in tmp_path.iterdir()} == {ODD_NAME, figure.name}
    assert (tmp_path / ODD_NAME / "mlflow.db").read_bytes()[18:20] == b"\x02\x02"  # write-ahead logging


def test_a_first_use_that_is_interrupted_between_tables_leaves_what_the_next_begins_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, own = Settings(home=tmp_path / ODD_NAME), HeadMaintainer.update_to_step

    def interrupted(maintainer: Any, step: Any) -> None:  # before MLflow notes the migration that it just made
        if inspect(maintainer.context.connection).has_table("assessments"):
            raise KeyboardInterrupt
        own(maintainer, step)

    store = Store(settings.mlflow_uri, settings.artifacts)
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(HeadMaintainer, "update_to_step", interrupted)
        store.recorded("gate")
    assert Store(settings.mlflow_uri, settings.artifacts).recorded("gate") == []


def test_a_metric_that_is_not_finite_is_refused_and_nothing_is_recorded(mlflow_store: Store) -> None:
    with pytest.raises(ValueError, match="metric gain is nan, wanted a finite number"):
        mlflow_store.record_run("gate", {}, {"gain": float("nan")}, [])
    assert mlflow_store.recorded("gate") == []
