"""The manifests, as `kubectl kustomize` renders them or, where it is missing, as they are written."""

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.imports import ROOT

FOLDER = ROOT / "infra" / "kubernetes"
OVERLAYS = ("single", "attached", "kuberay")
# Paths to pod templates in what is no Deployment or the like.
RAY = {"RayService": "rayClusterConfig", "RayJob": "rayClusterSpec"}


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
            yield from (
                (f"{name} {group['groupName']}", group["template"]) for group in cluster.get("workerGroupSpecs", ())
            )
        elif "template" in spec:
            yield name, spec["template"]


def of_kind(objects: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [one for one in objects if one["kind"] == kind]
