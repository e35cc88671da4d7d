"""Each manifest fits the schemas of Kubernetes and of KubeRay, and holds what is asked of every pod."""

import json
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from typer.main import get_command

from flows import cli
from infra.home import RECORDER_HEALTH
from infra.service_process import END_TIMEOUT_S
from infra.settings import load_settings
from infra.supervisor import Program
from models.engines.vllm import child_environment
from models.recipe import load_recipe
from services.access import OPEN_PATHS
from services.config import ServiceConfig, read_as
from services.replica import CLOSE_S, application
from services.reverse_proxy import CONFIG_VARIABLE
from services.runner import RAY_VARIABLES
from tests.imports import ROOT

FOLDER = ROOT / "infra" / "kubernetes"
# Paths to pod templates in what is no Deployment or the like.
RAY = {"RayService": "rayClusterConfig", "RayJob": "rayClusterSpec"}
VERSION = "1.37"  # of the schemas that kubernetes-validate has
CLOSED = {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}
WRITABLE = {"/tmp", "/dev/shm", "/var/lib/redraft"}  # noqa: S108 - mounts of a pod
KUBERAY = ROOT.parent / "shared" / "data" / "kubernetes"


def rendered(overlay: str) -> list[dict[str, Any]]:
    """Return the objects of an overlay; the test is skipped where nothing renders it."""
    for program in (("kubectl", "kustomize"), ("kustomize", "build")):
        if shutil.which(program[0]) is not None:
            done = subprocess.run([*program, str(FOLDER / "overlays" / overlay)], capture_output=True, check=True)
            return list(yaml.safe_load_all(done.stdout))
    pytest.skip("neither kubectl nor kustomize is installed")


def written() -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yield each object that a file holds, and the file; patches are parts of objects."""
    for file in sorted(FOLDER.rglob("*.yaml")):
        if file.name != "kustomization.yaml" and file != FOLDER / "overlays" / "attached" / "redraft.yaml":
            yield from ((file, one) for one in yaml.safe_load_all(file.read_text()))


def pods(objects: list[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the template of each kind of pod, with a name."""
    for one in objects:
        name, spec = f"{one['kind']} {one['metadata']['name']}", one.get("spec", {})
        if one["kind"] in RAY:
            cluster = spec[RAY[one["kind"]]]
            yield f"{name} head", cluster["headGroupSpec"]["template"]
            for group in cluster.get("workerGroupSpecs", ()):
                yield f"{name} {group['groupName']}", group["template"]
        elif "template" in spec:
            yield name, spec["template"]


def of_kind(objects: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [one for one in objects if one["kind"] == kind]


@pytest.fixture(params=["single", "attached", "kuberay"], scope="module")
def objects(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return rendered(request.param)


def closed(schema: Any) -> Any:
    """Return a schema that takes no key which it does not name, as the server of a cluster drops such keys."""
    if isinstance(schema, list):
        return [closed(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    inner = {name: closed(one) for name, one in schema.items()}
    if isinstance(inner.get("properties"), dict) and not inner.get("x-kubernetes-preserve-unknown-fields"):
        inner.setdefault("additionalProperties", False)
    return inner


def require_valid(one: dict[str, Any]) -> None:
    """Raise unless a schema takes an object, with nothing that it does not know."""
    if one["kind"] not in RAY:
        kubernetes_validate.validate(one, VERSION, strict=True)
        return
    if not KUBERAY.is_dir():
        pytest.skip(f"KubeRay's schemas are not in {KUBERAY}")
    schema = closed(json.loads((KUBERAY / f"{one['kind']}.v1.schema.json").read_text()))
    jsonschema.Draft202012Validator(schema).validate(one)


def test_what_is_rendered_is_what_a_cluster_takes(objects: list[dict[str, Any]]) -> None:
    for one in objects:
        require_valid(one)


@pytest.mark.parametrize("file", sorted({file for file, _ in written()}), ids=lambda file: file.stem)
def test_what_is_written_is_what_a_cluster_takes(file: Path) -> None:
    for one in yaml.safe_load_all(file.read_text()):
        require_valid(one)


def test_a_key_that_a_cluster_would_drop_is_noticed() -> None:
    for kind in ("StatefulSet", "RayService"):
        [one] = [one for _, one in written() if one["kind"] == kind]
        one["spec"]["replica"] = 1
        with pytest.raises(jsonschema.ValidationError, match="'replica' was unexpected"):
            require_valid(one)


def test_every_pod_is_an_ordinary_users_that_writes_to_named_mounts_and_says_what_it_takes(objects) -> None:
    claimed = {
        one["metadata"]["name"] for owner in objects for one in owner.get("spec", {}).get("volumeClaimTemplates", ())
    }
    for name, template in pods(objects):
        spec = template["spec"]
        assert spec["securityContext"]["runAsNonRoot"], name
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}, name
        assert (spec["automountServiceAccountToken"], spec["enableServiceLinks"]) == (False, False), name
        volumes = {one["name"] for one in spec["volumes"]} | claimed
        for container in [*spec["initContainers"], *spec["containers"]]:
            assert container["securityContext"] == CLOSED, name
            requests, limits = (container["resources"][kind] for kind in ("requests", "limits"))
            assert {"cpu", "memory"} <= requests.keys() & limits.keys(), name
            assert {one["name"] for one in container["volumeMounts"]} <= volumes, name
            assert ":" in container["image"]
        mounts = {one["mountPath"] for container in spec["containers"] for one in container["volumeMounts"]}
        assert mounts >= WRITABLE, name


def test_no_file_holds_a_secret_and_settings_are_known(objects: list[dict[str, Any]]) -> None:
    assert of_kind(objects, "Secret") == []
    for one in of_kind(objects, "ConfigMap"):
        load_settings({name: value for name, value in one["data"].items() if name.startswith("REDRAFT_")})
    maps = {one["metadata"]["name"] for one in of_kind(objects, "ConfigMap")}
    for _, template in pods(objects):
        for container in template["spec"]["containers"]:
            referred = [source["configMapRef"]["name"] for source in container["envFrom"] if "configMapRef" in source]
            assert referred == ["redraft"]
            assert maps >= {*referred}
            assert {"secretRef": {"name": "redraft"}} in container["envFrom"]


def test_each_pod_is_behind_the_policies_and_what_is_always_asked_is_behind_a_budget(objects) -> None:
    policies, [budget] = of_kind(objects, "NetworkPolicy"), of_kind(objects, "PodDisruptionBudget")
    templates = [template for _, template in pods(objects)]
    assert len(policies) >= 2
    for policy in policies:
        selector = policy["spec"]["podSelector"]["matchLabels"]
        assert all(selector.items() <= template["metadata"]["labels"].items() for template in templates)
    [serving] = [
        template
        for template in templates
        if any(port["name"] == "api" for one in template["spec"]["containers"] for port in one["ports"])
    ]
    assert budget["spec"]["selector"]["matchLabels"].items() <= serving["metadata"]["labels"].items()


def test_probes_ask_what_needs_no_key_at_a_port_that_is_there(objects: list[dict[str, Any]]) -> None:
    for _, template in pods(objects):
        for container in template["spec"]["containers"]:
            ports = {one["name"] for one in container["ports"]}
            for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
                if (asked := container.get(probe, {}).get("httpGet")) is None or asked["port"] == 52365:  # the raylet's
                    continue
                assert asked["port"] in ports
                assert asked["path"] in (*OPEN_PATHS, RECORDER_HEALTH)


def container_of(overlay: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the pod of an overlay that is one, and its container."""
    [(_, template)] = pods(rendered(overlay))
    [container] = template["spec"]["containers"]
    return template["spec"], container


def require_command(name: str, arguments: list[str]) -> None:
    get_command(cli.app).commands[name].make_context(name, arguments)


@pytest.mark.parametrize("overlay", ["single", "attached"])
def test_commands_are_what_the_command_line_takes(overlay: str) -> None:
    spec, container = container_of(overlay)
    for one in [*spec["initContainers"], container]:
        require_command(*one["args"][:1], one["args"][1:])
    port = next(one["containerPort"] for one in container["ports"] if one["name"] == "api")
    assert {"single": f"--set=serve.port={port}", "attached": f"--port={port}"}[overlay] in container["args"]


def test_a_pod_is_given_the_time_that_its_programs_take_to_end() -> None:
    spec, container = container_of("single")
    recipe = load_recipe("smollm2-cpu")
    others = 4 * Program("runner", []).grace_s  # Prefect, MLflow, the runner and the post-promotion test
    takes_s = container["lifecycle"]["preStop"]["sleep"]["seconds"] + recipe.serve.drain_s + END_TIMEOUT_S + others
    assert takes_s < spec["terminationGracePeriodSeconds"]


def test_a_ray_cluster_serves_what_a_file_says_behind_the_same_middleware(tmp_path, monkeypatch) -> None:
    [service] = [one for _, one in written() if one["kind"] == "RayService"]
    serve = yaml.safe_load(service["spec"]["serveConfigV2"])
    [app] = serve["applications"]
    assert app["import_path"] == f"{application.__module__}:{application.__name__}"
    monkeypatch.setenv("REDRAFT_HOME", str(tmp_path))
    file = FOLDER / "overlays" / "kuberay" / Path(app["args"]["config"]).name
    config = read_as(ServiceConfig, file)
    assert (config.settings.home, config.serve.port) == (tmp_path, serve["http_options"]["port"])
    bound = application({"config": str(file)})._bound_deployment
    told_to_each = bound.ray_actor_options["runtime_env"]["env_vars"]
    assert not told_to_each.keys() & child_environment().keys(), "cores are a node's own"
    assert "settings" not in json.loads(bound.init_args[0])
    templates = dict(pods([service]))
    worker = templates["RayService redraft replicas"]["spec"]
    told = {one["name"]: one["value"] for one in worker["containers"][0]["env"]}
    assert told[CONFIG_VARIABLE] == app["args"]["config"]
    middleware = "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"
    assert told[middleware] == RAY_VARIABLES[middleware]
    preparation_s = worker["containers"][0]["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert preparation_s + config.serve.drain_s + CLOSE_S < worker["terminationGracePeriodSeconds"]
    monkeypatch.setenv("REDRAFT_API_KEYS", "a-clients-key")
    with pytest.raises(ValueError, match=r"^REDRAFT_API_KEYS is set, wanted clients' keys in each node's home"):
        application({"config": str(file)})


def test_a_refresh_as_a_job_is_a_command_of_ours() -> None:
    [job] = [one for _, one in written() if one["kind"] == "RayJob"]
    program, name, *options = shlex.split(job["spec"]["entrypoint"])
    assert program == "redraft"
    require_command(name, options)
