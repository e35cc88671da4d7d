"""What one service is started with: a JSON file, read once."""

import ipaddress
import json
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, field_validator, model_validator

from infra.consent import Consent
from models import catalog
from models.engines.vllm import Params, require_tool_parser
from models.params import Frozen, validate
from models.serving import Serving


class ApiKey(Frozen):
    """An accepted bearer key, and what its owner agreed to have logged; nothing agreed is None."""

    key: str = Field(pattern=r"^[\x21-\x7e]{8,512}$", repr=False)
    log: Consent | None = None


def _as_key(value: object) -> object:
    return {"key": value} if isinstance(value, str) else value


class ServiceConfig(Frozen):
    """One replica's world.

    Attributes:
        target_dir: the target's Hugging Face directory, with its golden.json if drafts are followed.
        target_version: the target's number in the registry, 0 if it has none; rows of the query log carry it.
        follow_drafts: serve the draft that is the champion in the registry; false serves the target alone.
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
        orchestrator: API of the Prefect server that gets an event when acceptance falls; "" sends none.
        serve: how it serves, as table [serve] of a recipe says.
    """

    target_dir: Path
    target_version: int = Field(default=0, ge=0)
    follow_drafts: bool = True
    engine: dict[str, Any] = {"name": "vllm"}  # noqa: RUF012 - pydantic copies defaults
    registry_uri: str = Field(min_length=1)
    artifact_root: Path
    querylog: Path
    cache: Path
    state: Path
    host: str = "127.0.0.1"
    port: int = Field(ge=1, le=65535)
    api_keys: tuple[Annotated[ApiKey, BeforeValidator(_as_key)], ...] = ()
    served_name: str = Field(default="target", pattern=r"^[\w./:-]{1,128}$")
    orchestrator: str = ""
    serve: Serving = Serving()

    @field_validator("serve")
    @classmethod
    def _tools_can_be_parsed(cls, serve: Serving) -> Serving:
        if serve.tool_parser:
            require_tool_parser(serve.tool_parser)
        return serve

    @field_validator("target_dir", "artifact_root", "querylog", "cache", "state")
    @classmethod
    def _absolute(cls, path: Path) -> Path:
        return path.expanduser().absolute()  # a replica is another process with another working directory

    @model_validator(mode="after")
    def _strangers_need_a_key(self) -> "ServiceConfig":
        if not self.api_keys and not is_loopback(self.host):
            raise ValueError(f"host {self.host} is reachable from other machines, so api_keys must not be empty")
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
