"""What one service is started with: tables `[serve]` and `[engine]` of a recipe, the settings, and what to serve."""

import json
from pathlib import Path
from typing import Any, Self, TypeVar

from pydantic import Field, field_validator, model_validator

from infra.keys import keys_path
from infra.settings import AbsolutePath, Settings, load_settings
from models import catalog
from models.engines.vllm import Params, require_tool_parser
from models.params import validate
from models.serving import Serve
from models.types import Frozen

C = TypeVar("C", bound="ServiceConfig")

OTHER_REQUESTS = 16  # for health, status and metrics


class ServiceConfig(Frozen):
    """One replica's world, written by `infra.service_process.write_config`, without clients' keys.

    Attributes:
        target_version: the target's number in the registry, 0 if it has none; rows of the query log carry it.
        follow_drafts: serve the draft that is the champion in the registry; false serves the target alone.
        orchestrator: API of the Prefect server that gets an event when acceptance falls; "" sends none.
        settings: by default those of the environment of whoever reads it.
    """

    target_dir: AbsolutePath  # a replica is another process with another working directory
    target_version: int = Field(default=0, ge=0)
    follow_drafts: bool = True
    orchestrator: str = ""
    settings: Settings = Field(default_factory=load_settings)
    engine: dict[str, Any] = {"name": "vllm"}  # noqa: RUF012 - pydantic copies defaults
    serve: Serve = Serve()

    @field_validator("serve")
    @classmethod
    def _can_be_served(cls, serve: Serve) -> Serve:
        if not serve.port:
            raise ValueError("port is 0, wanted the one to bind")
        if serve.tool_parser:
            require_tool_parser(serve.tool_parser)
        return serve

    @model_validator(mode="after")
    def _can_be_placed(self) -> Self:
        target, gpus = self.serve.autoscaling.target_ongoing_requests, self.serve.num_gpus
        if target is not None and target > (most := self.max_requests - OTHER_REQUESTS):
            raise ValueError(
                f"serve.autoscaling.target_ongoing_requests is {target:g}; a replica takes {most} at most and refuses "
                "the rest, so no other would start"
            )
        if gpus and self.settings.device == "cpu":
            raise ValueError(f"serve.num_gpus is {gpus:g}, and REDRAFT_DEVICE is cpu")
        if gpus and gpus != (devices := self.engine_params().num_devices) and (devices > 1 or gpus > 1):
            raise ValueError(f"serve.num_gpus is {gpus:g}; the engine takes {devices}, or 0 stands for all of a node")
        if self.settings.ray_address and self.serve.front == "haproxy":
            raise ValueError('serve.front is "haproxy", and in the cluster of REDRAFT_RAY_ADDRESS only "ray" can serve')
        return self

    @property
    def keys(self) -> Path:
        return keys_path(self.settings)

    @property
    def memory(self) -> Path:
        """The file that remembers good and refused drafts over a restart."""
        return self.settings.home / "service-state.json"

    @property
    def url(self) -> str:
        return f"http://{self.settings.host}:{self.serve.port}"

    @property
    def follows(self) -> bool:
        """Whether drafts are served: they are followed, and the engine is to draft anything."""
        return self.follow_drafts and self.engine_params().num_draft_tokens > 0

    @property
    def max_requests(self) -> int:
        """How many requests a replica takes at once: those that run, those that wait by key, and some of operators."""
        return self.engine_params().max_num_seqs + self.serve.limits.max_queued_requests + OTHER_REQUESTS

    @property
    def num_gpus(self) -> float:
        """GPUs that Ray reserves for a replica; one alone, with a Ray of its own, sees all without that."""
        if self.serve.num_gpus is not None:
            return self.serve.num_gpus
        reserved = self.serve.most_replicas > 1 or self.settings.ray_address != ""
        return self.engine_params().num_devices if reserved and self.settings.device != "cpu" else 0

    def engine_params(self) -> Params:
        """Return the engine's parsed settings; ValueError names a wrong key, or an engine that has no endpoint."""
        params = catalog.parse("engines", self.engine)
        if not isinstance(params, Params):
            raise ValueError(f'engine "{params.name}" has no endpoint; the service runs "vllm"')
        return params


def read_as(kind: type[C], path: Path) -> C:
    """Read a JSON file of settings; ValueError if it is no JSON object, or names each key that is wrong or missing."""
    try:
        values = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} can't be read as JSON: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} holds a {type(values).__name__}, wanted a JSON object")
    return validate(kind, values, str(path))
