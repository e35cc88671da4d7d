import os
import re
import tempfile
import urllib.request
from collections.abc import Callable
from http.server import ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest
import requests

from infra.home import compiled_folder
from infra.settings import LOOPBACK_HOSTS, NO_PROXY, Settings, is_plain, load_settings, sqlite_file
from tests.conftest import ODD_NAME
from tests.infra.collector import QuietHandler, running
from tests.pod import OF_SERVICE

COMPILED = ("VLLM_CACHE_ROOT", "TORCH_EXTENSIONS_DIR")


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


MISSPELT = "is not a setting; did you mean REDRAFT_"


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("DEVCE", "cpu", f" {MISSPELT}DEVICE"),
        ("home", "cpu", f" {MISSPELT}HOME"),
        ("MLFLOW", "cpu", f" {MISSPELT}MLFLOW_URI"),
        ("PORT", "8000", f" {MISSPELT}"),  # what only looks like Kubernetes'
        ("SERVICE", "10.96.0.17", f" {MISSPELT}"),
        ("SERVICE_HOSTS", "10.96.0.17", f" {MISSPELT}"),
        ("PORT_8000", "tcp://10.96.0.17:8000", f" {MISSPELT}"),
        ("PORT_HTTP_TCP", "tcp://10.96.0.17:8000", f" {MISSPELT}"),
        ("service_host", "10.96.0.17", f" {MISSPELT}"),
        ("DEVICE", "gpu", ": Input should be 'cpu' or 'cuda'$"),
        ("RAY_ADDRESS", "ray://head:10001", ": got 'ray://head:10001', wanted HOST:PORT"),
        ("HUB", "perhaps", r": .*boolean[^\n]*$"),
        ("ARTIFACTS", "gs://bucket/x", ": .* is neither a folder nor s3://bucket/prefix"),
    ],
)
def test_a_variable_that_is_misspelt_or_takes_no_such_value_fails_with_its_name(name, value, told) -> None:
    with pytest.raises(ValueError, match=f"^REDRAFT_{name}{told}"):
        load_settings({f"REDRAFT_{name}": value})


def test_what_kubernetes_tells_of_services_is_no_misspelt_setting(tmp_path: Path) -> None:
    told = OF_SERVICE | {
        "REDRAFT_MLFLOW_SERVICE_HOST": "10.96.0.18",
        "REDRAFT_MLFLOW_PORT": "tcp://10.96.0.18:5000",
        "REDRAFT_HEAD_SVC_PORT_10001_UDP_ADDR": "fd00::12",
    }
    assert load_settings({"REDRAFT_HOME": str(tmp_path)} | told) == Settings(home=tmp_path)


def test_a_log_is_a_file_or_a_schema_of_a_postgres_that_is_the_homes_own_unless_it_is_named(tmp_path: Path) -> None:
    def of(log: str, home: str = "one") -> Settings:
        return load_settings({"REDRAFT_HOME": str(tmp_path / home), "REDRAFT_QUERYLOG": log})

    assert of("~/a.db").querylog == of("~/a.db").beside_log == Path("~/a.db").expanduser()
    one, other = of("postgresql://host/name"), of("postgresql://host/name", "other")
    assert re.fullmatch(r"postgresql://host/name\?schema=redraft_[0-9a-f]{12}", str(one.querylog))
    assert one.querylog != other.querylog
    assert one.beside_log == tmp_path / "one" / "queries.db"
    named = of("postgresql://user:secret@host/name?sslmode=require&schema=team")
    assert named.querylog == "postgresql://user:secret@host/name?sslmode=require&schema=team"
    for settings in (named, of("a.db")):
        assert Settings.model_validate_json(settings.model_dump_json()).querylog == settings.querylog
    assert "secret" not in repr(named)
    with pytest.raises(ValueError, match=r"^REDRAFT_QUERYLOG: got an address of mysql, wanted a file or postgresql://"):
        of("mysql://user:secret@host/name")


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


def test_the_registrys_address_leads_to_its_file_whatever_the_home_is_called(tmp_path: Path) -> None:
    assert sqlite_file(Settings(home=tmp_path / ODD_NAME).mlflow_uri) == tmp_path / ODD_NAME / "mlflow.db"
    assert sqlite_file("sqlite:////a/%41?.db") == Path("/a/%41?.db")
    assert sqlite_file("https://registry.example") is None


def test_what_is_compiled_lies_in_the_home_under_a_path_that_a_compiler_can_read(
    tmp_path, monkeypatch, own_environment
) -> None:
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    for name in COMPILED:
        os.environ.pop(name, None)
    settings = Settings(home=tmp_path / ODD_NAME)
    for _ in range(2):
        settings.prepare_environment()
    folders = [Path(os.environ[name]) for name in COMPILED] + [compiled_folder(settings.cache)]
    assert all(map(is_plain, folders))
    assert [folder.resolve().parent for folder in folders] == [settings.cache] * 3
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / f"redraft-{os.getuid()}").symlink_to(tmp_path)
    with pytest.raises(ValueError, match=r"is not this user's folder, .*; set TMPDIR to one that is"):
        settings.prepare_environment()


class Answer(QuietHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"direct")


ASKING: dict[str, Callable[[str], str]] = {
    "urllib": lambda url: urllib.request.urlopen(url).read().decode(),
    "httpx": lambda url: httpx.get(url).text,
    "requests": lambda url: requests.get(url, timeout=5).text,
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("library", "kind"), [("urllib", "http"), ("httpx", "http"), ("httpx", "socks5"), ("requests", "socks5")]
)
def test_no_proxy_is_asked_for_loopback_nor_for_the_address_of_this_service(
    monkeypatch, tmp_path, own_environment, library, kind
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, f"{kind}://127.0.0.1:9")
    os.environ.pop("NO_PROXY", None)
    os.environ["no_proxy"] = "registry.example, .internal"
    Settings(home=tmp_path, host="127.0.0.2").prepare_environment()
    wanted = ",".join(("registry.example", ".internal", *LOOPBACK_HOSTS, "127.0.0.2"))
    assert [os.environ[name] for name in NO_PROXY] == [wanted, wanted]
    for host in ("127.0.0.1", "127.0.0.2", "localhost"):
        with running(ThreadingHTTPServer((host, 0), Answer)) as server:
            assert ASKING[library](f"http://{host}:{server.server_port}/") == "direct"


def test_who_wants_no_proxy_at_all_gets_none(tmp_path: Path, own_environment: None) -> None:
    os.environ |= dict.fromkeys(NO_PROXY, "*")
    Settings(home=tmp_path).prepare_environment()
    assert [os.environ[name] for name in NO_PROXY] == ["*", "*"]
