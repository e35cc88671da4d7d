"""What one service is started with: a JSON file, read once. Only target, draft method and K need a restart."""

import ipaddress
import json
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, field_validator, model_validator

from infra.consent import Consent
from models import catalog
from models.engines.vllm import Params, require_tool_parser
from models.params import Frozen, validate
from models.watch import Params as WatchParams

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class ApiKey(Frozen):
    """An accepted bearer key, and what its owner agreed to have logged; nothing agreed is None."""

    key: str = Field(pattern=r"^[\x21-\x7e]{8,512}$", repr=False)
    log: Consent | None = None


class Probation(Frozen):
    """What a draft must show after it was loaded.

    Attributes:
        num_prompts: how many golden prompts are generated, from the first.
        tolerance: share of the promised gain over 1.0 (tag `probe_tau`) that may be missing.
        timeout_s: a draft that takes longer is put back, and tried again after as long, then twice as long, and so on.
    """

    num_prompts: int = Field(default=8, ge=1)
    tolerance: float = Field(default=0.5, ge=0, lt=1)
    timeout_s: Positive = 300.0


def _as_key(value: object) -> object:
    return {"key": value} if isinstance(value, str) else value


class ServiceConfig(Frozen):
    """One replica's world.

    Attributes:
        target_dir: the target's Hugging Face directory, with its golden.json if drafts are followed.
        target_version: the target's number in the registry, 0 if it has none; rows of the query log carry it.
        draft: method of the drafts that are followed, a file of models/drafts; None serves the target alone.
        engine: table of the engine, with its name and Params.
        registry_uri: MLflow's store.
        artifact_root: where MLflow keeps files.
        querylog: the SQLite file.
        cache: where downloaded versions lie.
        state: the JSON file that remembers good and refused drafts over a restart.
        host: address to bind; other than loopback it needs `api_keys`.
        port: TCP port.
        api_keys: accepted keys, as text or with a logging policy; none means that none is asked for.
        served_name: the model's name in requests.
        tool_parser: vLLM's name of how the target writes tool calls; "" takes no tools.
        poll_s: seconds between looks at the registry.
        min_swap_interval_s: seconds that a swap is kept from the one before.
        max_ongoing_requests: requests in the engine at once.
        max_queued_requests: requests that wait in the proxy; above it the answer is 503.
        max_body_bytes: largest request body.
        body_timeout_s: seconds that a body may take to arrive.
        drain_s: seconds that running requests get when the service ends.
        probation: the checks after a load.
        orchestrator: API of the Prefect server that is told when acceptance fell; "" tells nobody.
        watch: when it is told.
    """

    target_dir: Path
    target_version: int = Field(default=0, ge=0)
    draft: str | None = "eagle3"
    engine: dict[str, Any] = {"name": "vllm"}  # noqa: RUF012 - pydantic copies defaults
    registry_uri: str = Field(min_length=1)
    artifact_root: Path
    querylog: Path
    cache: Path
    state: Path
    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=1, le=65535)
    api_keys: tuple[Annotated[ApiKey, BeforeValidator(_as_key)], ...] = ()
    served_name: str = Field(default="target", pattern=r"^[\w./:-]{1,128}$")
    tool_parser: str = ""
    poll_s: Positive = 5.0
    min_swap_interval_s: float = Field(default=10.0, ge=0, allow_inf_nan=False)
    max_ongoing_requests: int = Field(default=64, ge=1)
    max_queued_requests: int = Field(default=256, ge=0)
    max_body_bytes: int = Field(default=1 << 20, ge=1)
    body_timeout_s: Positive = 30.0
    drain_s: Positive = 30.0
    probation: Probation = Probation()
    orchestrator: str = ""
    watch: WatchParams = WatchParams()

    @field_validator("tool_parser")
    @classmethod
    def _is_known(cls, tool_parser: str) -> str:
        if tool_parser:
            require_tool_parser(tool_parser)
        return tool_parser

    @field_validator("target_dir", "artifact_root", "querylog", "cache", "state")
    @classmethod
    def _absolute(cls, path: Path) -> Path:
        return path.expanduser().absolute()  # a replica is another process with another working directory

    @model_validator(mode="after")
    def _strangers_need_a_key(self) -> "ServiceConfig":
        if not self.api_keys and not is_loopback(self.host):
            raise ValueError(f"host {self.host} can be reached from other machines, so api_keys must not be empty")
        return self

    def engine_params(self) -> Params:
        """Return the engine's parsed settings; ValueError names a wrong key, or an engine that has no endpoint."""
        params = catalog.parse("engines", self.engine)
        if not isinstance(params, Params):
            raise ValueError(f'engine "{params.name}" has no endpoint; the service runs "vllm"')
        return params


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches an address; a name other than localhost does not count."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def read_config(path: Path) -> ServiceConfig:
    """Read the JSON file of a service.

    Raises:
        ValueError: it can't be read, is no JSON object, or a key is unknown, missing or wrong; names each.
    """
    try:
        values = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} can't be read as JSON: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} holds a {type(values).__name__}, wanted a JSON object")
    return validate(ServiceConfig, values, str(path))
