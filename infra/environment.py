"""A process's home folder is in its environment; a benchmark's is a folder of its own, and so is its children's.

Prefect and MLflow read theirs when they are imported, so this module imports neither.
"""

import os
from pathlib import Path

from infra.settings import PREFIX, Settings, load_settings

# What lies below the home unless a variable says otherwise must not lie anywhere else; and a benchmark's service binds
# loopback, and is asked with its home's own key.
NOT_TAKEN = tuple(PREFIX + name for name in ("MLFLOW_URI", "QUERYLOG", "CACHE", "ARTIFACTS", "HOST", "API_KEYS"))


def environment_of(home: Path) -> dict[str, str]:
    """Return the variables that make `home` a process's home folder, whatever this process's own is."""
    own = {name: value for name, value in os.environ.items() if name.startswith(PREFIX) and name not in NOT_TAKEN}
    own[f"{PREFIX}HOME"] = str(home)
    return {**own, **load_settings(own).home_variables()}


def enter_home(home: Path) -> Settings:
    environment = environment_of(home)
    for name in NOT_TAKEN:
        os.environ.pop(name, None)
    os.environ.update(environment)
    settings = load_settings()
    settings.prepare_environment()
    home.mkdir(parents=True, exist_ok=True, mode=0o700)
    return settings
