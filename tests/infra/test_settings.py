import os
import re
import tempfile
import threading
import urllib.request
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest
import requests

from infra.serving import compiled_folder
from infra.settings import LOOPBACK_HOSTS, NO_PROXY, Settings, is_plain, load_settings, sqlite_file
from tests.conftest import ODD_NAME
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


@pytest.mark.parametrize(
    ("variable", "nearest"),
    [("REDRAFT_DEVCE", "REDRAFT_DEVICE"), ("REDRAFT_home", "REDRAFT_HOME"), ("REDRAFT_MLFLOW", "REDRAFT_MLFLOW_URI")],
)
def test_a_misspelt_variable_fails_with_its_name_and_the_nearest_one(variable: str, nearest: str) -> None:
    with pytest.raises(ValueError, match=f"{variable} is not a setting; did you mean {nearest}"):
        load_settings({variable: "cpu"})


def test_what_kubernetes_tells_of_services_is_no_misspelt_setting(tmp_path: Path) -> None:
    told = OF_SERVICE | {
        "REDRAFT_MLFLOW_SERVICE_HOST": "10.96.0.18",
        "REDRAFT_MLFLOW_PORT": "tcp://10.96.0.18:5000",
        "REDRAFT_HEAD_SVC_PORT_10001_UDP_ADDR": "fd00::12",
    }
    assert load_settings({"REDRAFT_HOME": str(tmp_path)} | told) == Settings(home=tmp_path)


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("REDRAFT_PORT", "8000"),
        ("REDRAFT_SERVICE", "10.96.0.17"),
        ("REDRAFT_SERVICE_HOSTS", "10.96.0.17"),
        ("REDRAFT_PORT_8000", "tcp://10.96.0.17:8000"),
        ("REDRAFT_PORT_HTTP_TCP", "tcp://10.96.0.17:8000"),
        ("REDRAFT_service_host", "10.96.0.17"),
    ],
)
def test_what_only_looks_like_kubernetes_is_a_misspelt_setting(variable: str, value: str) -> None:
    with pytest.raises(ValueError, match=f"^{variable} is not a setting; did you mean REDRAFT_[A-Z_]+[?]$"):
        load_settings({variable: value})


def test_a_value_that_the_setting_does_not_take_fails_with_its_name() -> None:
    with pytest.raises(ValueError, match=r"^REDRAFT_DEVICE: Input should be 'cpu' or 'cuda'$"):
        load_settings({"REDRAFT_DEVICE": "gpu"})
    with pytest.raises(ValueError, match=r"^REDRAFT_HUB: .*boolean[^\n]*$"):
        load_settings({"REDRAFT_HUB": "perhaps"})


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


@pytest.mark.parametrize("name", ["home", ODD_NAME])
def test_the_registrys_address_leads_to_its_file_whatever_the_home_is_called(tmp_path: Path, name: str) -> None:
    settings = Settings(home=tmp_path / name)
    assert sqlite_file(settings.mlflow_uri) == tmp_path / name / "mlflow.db"
    assert sqlite_file("sqlite:////a/%41?.db") == Path("/a/%41?.db")
    assert sqlite_file("https://registry.example") is None


def test_what_is_compiled_lies_in_the_home_under_a_path_that_a_compiler_can_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_environment: None
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


class Answer(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"direct")

    def log_message(self, *_: object) -> None:
        """Say nothing on the terminal."""


ASKING: dict[str, Callable[[str], str]] = {
    "urllib": lambda url: urllib.request.urlopen(url).read().decode(),
    "httpx": lambda url: httpx.get(url).text,
    "requests": lambda url: requests.get(url, timeout=5).text,
}


@pytest.mark.parametrize("proxy", ["http://127.0.0.1:9", "socks5://127.0.0.1:9"])
@pytest.mark.parametrize("library", ASKING)
def test_no_proxy_is_asked_for_loopback_nor_for_the_address_of_this_service(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, own_environment: None, proxy: str, library: str
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, proxy)
    os.environ.pop("NO_PROXY", None)
    os.environ["no_proxy"] = "registry.example, .internal"
    Settings(home=tmp_path, host="127.0.0.2").prepare_environment()
    wanted = ",".join(("registry.example", ".internal", *LOOPBACK_HOSTS, "127.0.0.2"))
    assert [os.environ[name] for name in NO_PROXY] == [wanted, wanted]
    for host in ("127.0.0.1", "127.0.0.2", "localhost"):
        with ThreadingHTTPServer((host, 0), Answer) as server:
            threading.Thread(target=server.serve_forever, args=(0.01,)).start()
            assert ASKING[library](f"http://{host}:{server.server_port}/") == "direct"
            server.shutdown()


def test_who_wants_no_proxy_at_all_gets_none(tmp_path: Path, own_environment: None) -> None:
    os.environ |= dict.fromkeys(NO_PROXY, "*")
    Settings(home=tmp_path).prepare_environment()
    assert [os.environ[name] for name in NO_PROXY] == ["*", "*"]
