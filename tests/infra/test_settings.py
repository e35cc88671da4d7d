import os
from pathlib import Path

import pytest

from infra.settings import Settings, load_settings


def test_everything_lies_below_the_home_unless_it_is_said_otherwise(tmp_path: Path) -> None:
    settings = load_settings({"REDRAFT_HOME": str(tmp_path), "REDRAFT_CACHE": "/elsewhere", "PATH": "/bin"})
    assert settings.mlflow_uri == f"sqlite:///{tmp_path}/mlflow.db"
    assert settings.querylog == tmp_path / "queries.db"
    assert settings.artifacts == tmp_path / "artifacts"
    assert settings.cache == Path("/elsewhere")
    assert (settings.device, settings.host, settings.api_keys, settings.hub) == ("cpu", "127.0.0.1", (), False)


def test_the_default_home_is_absolute(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_settings({}).home == tmp_path / ".redraft"


def test_keys_are_split_at_commas_and_kept_out_of_the_representation() -> None:
    settings = load_settings({"REDRAFT_API_KEYS": "the-first-key, the-second-key,"})
    assert settings.api_keys == ("the-first-key", "the-second-key")
    assert "the-first-key" not in repr(settings)


def test_a_key_that_can_be_none_is_refused_by_its_place_and_never_told() -> None:
    for key in ("short", "with a space", "caf\u00e9-caf\u00e9"):
        with pytest.raises(ValueError, match=r"^REDRAFT_API_KEYS: key 2 of 2 has \d+ characters") as refused:
            load_settings({"REDRAFT_API_KEYS": f"the-first-key,{key}"})
        assert key not in str(refused.value)


@pytest.mark.parametrize(
    ("variable", "nearest"),
    [("REDRAFT_DEVCE", "REDRAFT_DEVICE"), ("REDRAFT_home", "REDRAFT_HOME"), ("REDRAFT_MLFLOW", "REDRAFT_MLFLOW_URI")],
)
def test_a_misspelt_variable_fails_with_its_name_and_the_nearest_one(variable: str, nearest: str) -> None:
    with pytest.raises(ValueError, match=f"{variable} is not a setting; did you mean {nearest}"):
        load_settings({variable: "cpu"})


def test_a_value_that_the_setting_does_not_take_fails_with_its_name() -> None:
    with pytest.raises(ValueError, match=r"^REDRAFT_DEVICE: Input should be 'cpu' or 'cuda'$"):
        load_settings({"REDRAFT_DEVICE": "gpu"})
    with pytest.raises(ValueError, match=r"^REDRAFT_HUB: .*boolean[^\n]*$"):
        load_settings({"REDRAFT_HUB": "perhaps"})


def test_the_environment_is_prepared_and_what_is_set_stays(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    settings = Settings(home=tmp_path)
    for name in settings.process_variables():
        monkeypatch.setenv(name, "to be restored")
        monkeypatch.delenv(name)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "9")
    monkeypatch.setenv("REDRAFT_API_KEYS", "a-key-that-no-child-needs")
    settings.prepare_environment()
    assert os.environ["PREFECT_HOME"] == str(tmp_path / "prefect")
    assert os.environ["PREFECT_RESULTS_DEFAULT_SERIALIZER"] == "json"
    assert os.environ["HF_HUB_OFFLINE"] == "1"
    assert os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"] == "9"
    assert "REDRAFT_API_KEYS" not in os.environ
    assert "HF_HUB_OFFLINE" not in Settings(home=tmp_path, hub=True).process_variables()
