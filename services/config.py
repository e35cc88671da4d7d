"""What one service is started with: a JSON file, read once."""

import json
from pathlib import Path
from typing import Any

from pydantic import Field, field_validator

from models import catalog
from models.engines.vllm import Params, require_tool_parser
from models.params import validate
from models.serving import Serving
from models.types import Frozen

OTHER_REQUESTS = 16  # for health, status and metrics


class ServiceConfig(Frozen):
    """One replica's world.

    Attributes:
        target_dir: the target's Hugging Face directory, with its golden.json if drafts are followed.
        target_version: the target's number in the registry, 0 if it has none; rows of the query log carry it.
        follow_drafts: serve the draft that is the champion in the registry; false serves the target alone.
        engine: table of the engine, with its name and Params.
        mlflow_uri: MLflow's store.
        mlflow_files: where MLflow keeps files.
        querylog: the SQLite file.
        cache: where downloaded versions lie.
        state: the JSON file that remembers good and refused drafts over a restart.
        keys: the file of the accepted keys (infra/keys.py).
        host: address to bind; other than loopback it needs a client's key.
        port: TCP port.
        served_name: the model's name in requests.
        orchestrator: API of the Prefect server that gets an event when acceptance falls; "" sends none.
        serve: how it serves, as table [serve] of a recipe says.
    """

    target_dir: Path
    target_version: int = Field(default=0, ge=0)
    follow_drafts: bool = True
    engine: dict[str, Any] = {"name": "vllm"}  # noqa: RUF012 - pydantic copies defaults
    mlflow_uri: str = Field(min_length=1)
    mlflow_files: Path
    querylog: Path
    cache: Path
    state: Path
    keys: Path
    host: str = "127.0.0.1"
    port: int = Field(ge=1, le=65535)
    served_name: str = Field(default="target", pattern=r"^[\w./:-]{1,128}$")
    orchestrator: str = ""
    serve: Serving = Serving()

    @field_validator("serve")
    @classmethod
    def _tools_can_be_parsed(cls, serve: Serving) -> Serving:
        if serve.tool_parser:
            require_tool_parser(serve.tool_parser)
        return serve

    @field_validator("target_dir", "mlflow_files", "querylog", "cache", "state", "keys")
    @classmethod
    def _absolute(cls, path: Path) -> Path:
        return path.expanduser().absolute()  # a replica is another process with another working directory

    @property
    def follows(self) -> bool:
        """Whether drafts are served: they are followed, and the engine is to draft anything."""
        return self.follow_drafts and self.engine_params().num_draft_tokens > 0

    @property
    def max_requests(self) -> int:
        """How many requests a replica takes at once: those that run, those that wait by key, and some of operators."""
        return self.engine_params().max_num_seqs + self.serve.limits.max_queued_requests + OTHER_REQUESTS

    def engine_params(self) -> Params:
        """Return the engine's parsed settings; ValueError names a wrong key, or an engine that has no endpoint."""
        params = catalog.parse("engines", self.engine)
        if not isinstance(params, Params):
            raise ValueError(f'engine "{params.name}" has no endpoint; the service runs "vllm"')
        return params


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
