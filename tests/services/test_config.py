import json
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from infra.home import is_served
from infra.processes import Child, free_port, wait_until
from infra.settings import Settings
from models.serving import Limits, Probation, Serve
from services.config import ServiceConfig, read_as
from services.main import main
from services.replica import deployment
from tests.infra.rows import ROOT

SPREAD = {"name": "vllm", "extra": {"tensor_parallel_size": 2}}


def write(tmp_path: Path, **changes: Any) -> Path:
    path, settings = tmp_path / "service.json", Settings(home=tmp_path).model_dump(mode="json", exclude={"api_keys"})
    changes["settings"] = settings | changes.get("settings", {})
    path.write_text(json.dumps({"target_dir": str(tmp_path / "target")} | changes))
    return path


def test_a_config_survives_its_own_json_and_its_relative_paths_become_absolute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    serve = Serve(port=1, drain_s=3, probation=Probation(timeout_s=12), limits=Limits(max_queued_requests=7))
    told = {"engine": {"name": "vllm", "max_model_len": 256}, "serve": serve.model_dump(mode="json")}
    config = read_as(ServiceConfig, write(tmp_path, target_dir="here", **told))
    assert ServiceConfig.model_validate_json(config.model_dump_json()) == config
    assert (config.engine_params().name, config.serve, config.target_dir) == ("vllm", serve, tmp_path / "here")


def test_drafts_are_followed_where_the_engine_is_to_draft(tmp_path: Path) -> None:
    for num_draft_tokens, follow, wanted in ((1, True, True), (0, True, False), (1, False, False)):
        engine = {"name": "vllm", "num_draft_tokens": num_draft_tokens}
        assert read_as(ServiceConfig, write(tmp_path, engine=engine, follow_drafts=follow)).follows is wanted


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"pol_s": 1}, "pol_s"),
        ({"serve": {"probation": {"timeout": 1}}}, r"serve\.probation\.timeout"),
        ({"serve": {"tool_parser": "herms"}}, r'did you mean "hermes"'),
        ({"serve": {"port": 0}}, "port is 0"),
        (
            {"serve": {"port": 1, "num_replicas": 2, "front": "haproxy"}},
            'to one replica; of 2, "ray"',
        ),
        ({"serve": {"port": 1, "num_replicas": 2, "autoscaling": {"max_replicas": 3}}}, "wanted one of them"),
        ({"serve": {"port": 1, "front": "haproxy", "autoscaling": {"max_replicas": 3}}}, 'of 3, "ray"'),
        ({"serve": {"autoscaling": {"min_replicas": 2}}}, "min_replicas is 2, wanted at most max_replicas, 1"),
        ({"serve": {"autoscaling": {"upscale_delay_s": 1}}}, '"upscale_delay_s" would do nothing'),
        (
            {"serve": {"autoscaling": {"max_replicas": 2, "target_ongoing_requests": 289}}},
            "a replica takes 288 at most",
        ),
        ({"serve": {"num_gpus": 0.5}}, "num_gpus is 0.5, and REDRAFT_DEVICE is cpu"),
        ({"serve": {"num_gpus": 1.5}, "settings": {"device": "cuda"}}, "num_gpus is 1.5; the engine takes 1, or 0"),
        ({"serve": {"num_gpus": 0.5}, "settings": {"device": "cuda"}, "engine": SPREAD}, "the engine takes 2, or 0"),
        ({"serve": {"front": "haproxy"}, "settings": {"ray_address": "head:6379"}}, "REDRAFT_RAY_ADDRESS"),
        ({"serve": {"port": 1, "rollout": {"waves": [0.5]}}}, "wanted shares that grow from above 0 to 1"),
        ({"settings": {"hom": "here"}}, r"settings\.hom"),
    ],
)
def test_a_wrong_key_is_named(tmp_path: Path, changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        read_as(ServiceConfig, write(tmp_path, **changes))


@pytest.mark.parametrize(
    ("serve", "settings", "engine", "wanted"),
    [
        ({}, {}, {"name": "vllm"}, 0),
        ({"num_replicas": 2}, {}, {"name": "vllm"}, 0),
        ({}, {"device": "cuda"}, SPREAD, 0),  # it sees all
        ({"num_replicas": 2}, {"device": "cuda"}, SPREAD, 2),
        ({"autoscaling": {"max_replicas": 2}}, {"device": "cuda"}, {"name": "vllm"}, 1),
        ({}, {"device": "cuda", "ray_address": "head:6379"}, {"name": "vllm"}, 1),
        ({"num_gpus": 0.5, "num_replicas": 2}, {"device": "cuda"}, {"name": "vllm"}, 0.5),
        ({"num_gpus": 0}, {"device": "cuda", "ray_address": "head:6379"}, {"name": "vllm"}, 0),
    ],
)
def test_a_replica_gets_the_gpus_of_its_engine_or_the_share_that_is_said(
    tmp_path: Path, serve: dict[str, Any], settings: dict[str, Any], engine: dict[str, Any], wanted: float
) -> None:
    config = read_as(ServiceConfig, write(tmp_path, serve=serve, settings=settings, engine=engine))
    options = deployment(config, None)._bound_deployment.ray_actor_options
    assert (options or {})["num_gpus"] == wanted


@pytest.mark.parametrize("content", ["", "[]", '{"a":'])
def test_a_file_that_is_no_json_object_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "service.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"service\.json"):
        read_as(ServiceConfig, path)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"settings": {"host": "0.0.0.0"}}, "no client has a key; make one: redraft keys add NAME"),
        ({"engine": {"name": "vllm", "max_len": 1}}, "max_len"),
        ({"engine": {"name": "torch"}}, "has no endpoint"),
        ({"settings": {"ray_address": "127.0.0.1:1"}}, "REDRAFT_RAY_ADDRESS: nothing listens at 127.0.0.1:1"),
    ],
)
def test_the_service_does_not_start_with_a_wrong_config(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], named: str
) -> None:
    assert main(["--config", str(write(tmp_path, **changes))]) == 2
    told = capsys.readouterr().err
    assert named in told
    assert told.count("\n") == 1


@pytest.mark.slow
def test_the_port_is_the_services_before_ray_starts_which_takes_many(tmp_path: Path) -> None:
    config, home = write(tmp_path, serve={"port": (port := free_port())}), tmp_path / "home"
    argv = [sys.executable, "-m", "services.main", "--config", str(config)]
    environment = {"REDRAFT_HOME": str(home), "PYTHONPATH": str(ROOT)}
    with Child.start(argv, environment, tmp_path / "log", "the service") as service, socket.socket() as stranger:
        wait_until(lambda: is_served(home), 60, service, "the service to begin")
        stranger.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with pytest.raises(OSError, match="in use"):
            stranger.bind(("127.0.0.1", port))
