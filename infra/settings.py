"""Addresses, folders and secrets, from variables named REDRAFT_*.

A variable that starts with REDRAFT_ and is not a field fails at once: a misspelt name would otherwise be a default
that nobody asked for. `prepare_environment` must run before Prefect, MLflow or the Hugging Face libraries are
imported, because they read their variables then.
"""

import difflib
import getpass
import hashlib
import os
import re
import stat
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import parse_qs, quote, unquote, urlsplit

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, PlainValidator, ValidationError, ValidationInfo

from models.types import Frozen

PREFIX = "REDRAFT_"
# Token of the plugin's routes, and what a server is told that records itself; neither is a setting of the home.
ATTACH_TOKEN = "REDRAFT_ATTACH_TOKEN"  # noqa: S105 - the variable's name
RECORD_CONFIG = "REDRAFT_RECORD_CONFIG"
KEY = r"[\x21-\x7e]{8,512}"
# What Kubernetes tells each container of a Service named redraft or redraft-…; the value of a port is an address.
OF_SERVICE = re.compile(
    r"REDRAFT_([A-Z0-9_]+_)?"
    r"((SERVICE_HOST|SERVICE_PORT(_[A-Z0-9_]+)?|PORT_\d+_(TCP|UDP|SCTP)(_(ADDR|PORT|PROTO))?)=.*|PORT=[a-z]+://.+)"
)
# Of the list of hosts that are asked without a proxy; some libraries read the one, some the other.
NO_PROXY = ("no_proxy", "NO_PROXY")
LOOPBACK_HOSTS = ("localhost", "127.0.0.1", "::1")

QUIET_MLFLOW = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}
# A registry that is down must be noticed in seconds; MLflow's defaults wait for minutes.
PATIENCE_WITH_MLFLOW = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "3",
}


def _split_commas(value: object) -> object:
    return tuple(part.strip() for part in value.split(",") if part.strip()) if isinstance(value, str) else value


def _keys(keys: tuple[str, ...]) -> tuple[str, ...]:
    for number, key in enumerate(keys, 1):
        if re.fullmatch(KEY, key) is None:  # the key itself is never told
            wanted = "wanted 8 to 512, printable and without spaces"
            raise ValueError(f"key {number} of {len(keys)} has {len(key)} characters; {wanted}")
    return keys


def is_plain(path: Path) -> bool:
    """Return whether a path has only characters that mean nothing in an address, a command line or a configuration."""
    return quote(str(path)) == str(path)


def short_folder() -> Path:
    """Return this user's folder among the temporary files; ValueError if it is another's, or its path is not plain."""
    parent = Path(tempfile.gettempdir()) / f"redraft-{os.getuid()}"
    parent.mkdir(mode=0o700, exist_ok=True)
    found = parent.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or not is_plain(parent):
        what = "this user's folder, of letters, digits and -._~"
        raise ValueError(f"{parent} is not {what}; set TMPDIR to one that is, or choose another REDRAFT_HOME")
    parent.chmod(0o700)
    return parent


def plain_path(folder: Path) -> Path:
    """Return a path for programs that split a command at spaces: of a link, if the folder's own is not plain."""
    linked = hashlib.sha256(os.fsencode(folder)).hexdigest()[:16]
    return folder if is_plain(folder) else short_folder() / f"link-{linked}"


def sqlite_address(file: Path, driver: str = "pysqlite") -> str:
    """Return a database's address for SQLAlchemy; with a driver in it MLflow makes no folder of the whole address."""
    return f"sqlite:///{file}" if is_plain(file) else f"sqlite+{driver}:///file:{quote(str(file))}?uri=true"


def sqlite_file(address: str) -> Path | None:
    """Return the file of such an address, None if it is of another database."""
    scheme, _, path = address.partition(":///")
    if scheme not in ("sqlite", "sqlite+pysqlite"):
        return None
    return Path(unquote(path.removeprefix("file:").partition("?")[0]) if path.startswith("file:") else path)


def _log_address(value: object, info: ValidationInfo) -> Path | str:
    """Return a file, or the address of a Postgres with the schema that the log is in: by default one for this home."""
    if isinstance(value, str) and "://" in value:
        found = urlsplit(value)
        if found.scheme not in ("postgres", "postgresql", "postgresql+psycopg"):
            raise ValueError(f"got an address of {found.scheme}, wanted a file or postgresql://user@host/database")
        if "schema" in parse_qs(found.query):
            return value
        own = hashlib.sha256(os.fsencode(info.data["home"])).hexdigest()[:12]
        return f"{value}{'&' if found.query else '?'}schema=redraft_{own}"
    if not isinstance(value, str | Path):
        raise ValueError(f"got a {type(value).__name__}, wanted a file or postgresql://user@host/database")
    return Path(value).expanduser().absolute()


AbsolutePath = Annotated[Path, AfterValidator(lambda path: path.expanduser().absolute())]


def _folder_or_bucket(value: object) -> Path | str:
    """Read where artifacts lie: a folder, or a place in an object store, whose address stays a text."""
    address = str(value)
    if "://" not in address:
        return Path(address).expanduser().absolute()
    if re.fullmatch(r"s3://[a-z0-9][a-z0-9.-]+(/[\w.-]+)*/?", address) is None:
        raise ValueError(f"{address!r} is neither a folder nor s3://bucket/prefix")
    return address.rstrip("/")


def _host_and_port(value: str) -> str:
    if value and re.fullmatch(r"[^\s/]+:\d{1,5}", value) is None:
        raise ValueError(f"got {value!r}, wanted HOST:PORT")
    return value


class Settings(Frozen):
    """What a process of redraft needs to know about the machine that it runs on.

    Attributes:
        home: everything that redraft writes lies below it, unless a field below says otherwise.
        device: what the engine and the training run on.
        mlflow_uri: address of MLflow's tracking and registry store.
        model_prefix: of names in MLflow, so that many targets can share one: `llama-8b-draft`.
        querylog: the query log's SQLite file, or the address of a Postgres, where `?schema=` names what homes share.
        cache: where replicas keep the versions they downloaded.
        cache_gib: size in GiB from which versions in the cache go that no process uses, least recently used first.
        artifacts: where tasks and MLflow keep checkpoints and snapshots. In an object store, `s3://bucket/prefix`, lies
            what other machines need: versions, what training goes on from, and reports.
        ray_address: of the Ray cluster, HOST:PORT of its head, that a service on the head's node joins; by default it
            starts a Ray of its own.
        api_keys: clients' keys that a service of this home is to accept besides those of its file (infra/keys.py).
        hub: whether a Hugging Face hub may be asked; without it a look-up fails at once.
    """

    model_config = ConfigDict(validate_default=True)

    home: AbsolutePath = Path(".redraft")
    device: Literal["cpu", "cuda"] = "cpu"
    mlflow_uri: str = Field(default_factory=lambda data: sqlite_address(data["home"] / "mlflow.db"), min_length=1)
    model_prefix: str = Field(default="", pattern=r"^([A-Za-z0-9][\w.-]*)?$")
    querylog: Annotated[Path | str, PlainValidator(_log_address)] = Field(
        default_factory=lambda data: data["home"] / "queries.db", repr=False
    )
    cache: AbsolutePath = Field(default_factory=lambda data: data["home"] / "cache")
    cache_gib: float = Field(default=200.0, gt=0)
    artifacts: Annotated[Path | str, PlainValidator(_folder_or_bucket)] = Field(
        default_factory=lambda data: data["home"] / "artifacts"
    )
    api_keys: Annotated[tuple[str, ...], BeforeValidator(_split_commas), AfterValidator(_keys)] = Field(
        default=(), repr=False
    )
    ray_address: Annotated[str, AfterValidator(_host_and_port)] = ""
    host: str = Field(default="127.0.0.1", min_length=1)
    hub: bool = False

    @property
    def api_key(self) -> str | None:
        """The key for a service of another home; one of this home is asked with its operator's key."""
        return self.api_keys[0] if self.api_keys else None

    @property
    def beside_log(self) -> Path:
        """What this machine's files that go with the query log lie beside: its file, or where that would be."""
        return self.querylog if isinstance(self.querylog, Path) else self.home / "queries.db"

    @property
    def costs(self) -> Path:
        return self.cache / "costs"

    @property
    def digests(self) -> Path:
        """Where the sha256 of large files is remembered."""
        return self.cache / "digests"

    @property
    def object_store(self) -> str:
        """Where artifacts lie for all machines, "" where they lie in a folder of this one."""
        return self.artifacts if isinstance(self.artifacts, str) else ""

    @property
    def local_artifacts(self) -> Path:
        """The folder in which this machine's tasks make directories."""
        return self.home / "artifacts" if isinstance(self.artifacts, str) else self.artifacts

    @property
    def mlflow_files(self) -> Path:
        return self.local_artifacts / "mlflow"

    def prepare_environment(self) -> None:
        """Set the process variables of the libraries; one that is already set stays.

        Keys leave the environment: no child needs them. What listens on loopback, or where this service does, is asked
        without a proxy by this process and all that it starts. Libraries ask where a user's folder is, and for a name;
        who has no account, as in most pods, gets both.
        """
        if os.environ.get("HOME", "/") == "/":  # what a container's runtime tells of a user that it doesn't know
            os.environ["HOME"] = str(self.cache / "user")
        try:
            getpass.getuser()
        except KeyError:
            os.environ["LOGNAME"] = str(os.getuid())
        if (link := plain_path(self.cache)) != self.cache:
            self.cache.mkdir(mode=0o700, parents=True, exist_ok=True)
            with suppress(FileExistsError):
                link.symlink_to(self.cache)
        for name, value in self.process_variables().items():
            os.environ.setdefault(name, value)
        os.environ.pop(f"{PREFIX}API_KEYS", None)
        listed = [host.strip() for name in NO_PROXY for host in os.environ.get(name, "").split(",") if host.strip()]
        if "*" not in listed:  # which some libraries take for every host only where it stands alone
            os.environ |= dict.fromkeys(NO_PROXY, ",".join(dict.fromkeys([*listed, *LOOPBACK_HOSTS, self.host])))

    def home_variables(self) -> dict[str, str]:
        """Return those of the process variables that say where the home is."""
        prefect = self.home / "prefect"
        database = sqlite_address(prefect / "prefect.db", "aiosqlite")
        return {
            "PREFECT_HOME": str(prefect),
            # Neither is implied by PREFECT_HOME.
            "PREFECT_RESULTS_LOCAL_STORAGE_PATH": str(prefect / "results"),
            "PREFECT_SERVER_MEMO_STORE_PATH": str(prefect / "memo_store.toml"),
            "PREFECT_SERVER_UI_STATIC_DIRECTORY": str(prefect / "ui"),  # it would write beside its own code
            # Prefect's own has the path as it is.
            **({} if is_plain(prefect) else {"PREFECT_API_DATABASE_CONNECTION_URL": database}),
            "MLFLOW_TRACKING_URI": self.mlflow_uri,
            # What these libraries compile or list would lie in folders of the user.
            "VLLM_CACHE_ROOT": str(plain_path(self.cache) / "vllm"),
            "TORCH_EXTENSIONS_DIR": str(plain_path(self.cache) / "extensions"),
            "MPLCONFIGDIR": str(self.cache / "matplotlib"),
        }

    def process_variables(self) -> dict[str, str]:
        return {
            **self.home_variables(),
            "PREFECT_RESULTS_DEFAULT_SERIALIZER": "json",  # the default is pickle
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
            # By default any site's pages may read what it answers; its own need no leave.
            "PREFECT_SERVER_CORS_ALLOWED_ORIGINS": "http://127.0.0.1",
            # Prefect's own server makes its tables at the first start: on a busy machine that takes more than its 20 s.
            "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "120",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
            **QUIET_MLFLOW,
            **PATIENCE_WITH_MLFLOW,
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "RAY_USAGE_STATS_ENABLED": "0",
            "VLLM_NO_USAGE_STATS": "1",
            # What libraries tell their developers would stand between a command's lines.
            "TORCH_LOGS": "-torch._library.triton",
            "TORCH_CPP_LOG_LEVEL": "ERROR",
            "PYTHONWARNINGS": "ignore::FutureWarning",
            "PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW": "ignore",
            **({} if self.hub else {"HF_HUB_OFFLINE": "1"}),
        }


def load_settings(environment: Mapping[str, str] | None = None) -> Settings:
    """Read the settings from REDRAFT_* variables, by default the process's own.

    ValueError if one is not a setting, with the nearest one, or its value is not one that the setting takes.
    """
    environment = os.environ if environment is None else environment
    values: dict[str, Any] = {}
    for variable in sorted(environment):
        if not variable.startswith(PREFIX) or variable in (ATTACH_TOKEN, RECORD_CONFIG):
            continue
        if OF_SERVICE.fullmatch(f"{variable}={environment[variable]}"):
            continue
        field = variable.removeprefix(PREFIX).lower()
        if field not in Settings.model_fields or variable != variable.upper():
            known = [PREFIX + name.upper() for name in Settings.model_fields]
            nearest = difflib.get_close_matches(variable.upper(), known, n=1, cutoff=0.0)[0]
            raise ValueError(f"{variable} is not a setting; did you mean {nearest}?")
        values[field] = environment[variable]
    try:
        return Settings(**values)
    except ValidationError as error:
        # Only the causes, without their values: one may be a key.
        faults = [one for one in error.errors() if one["type"] != "default_factory_not_called"]
        lines = (f"{PREFIX}{str(one['loc'][0]).upper()}: {one['msg'].removeprefix('Value error, ')}" for one in faults)
        raise ValueError("\n".join(lines)) from None
