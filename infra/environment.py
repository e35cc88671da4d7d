"""A process's home folder is in its environment; a benchmark's is a folder of its own, and so is its children's.

Prefect and MLflow read theirs when they are imported, so this module imports neither.
"""

import os
from pathlib import Path

from infra.settings import PREFIX, Settings, load_settings

# What lies below the home unless a variable says otherwise: a benchmark's must not lie anywhere else.
BELOW_HOME = ("MLFLOW_URI", "QUERYLOG", "CACHE", "ARTIFACTS")
# Nor is a benchmark's service anybody else's: it binds loopback, and is asked with its home's own key.
OF_THE_SERVED = ("HOST", "API_KEYS")


def environment_of(home: Path) -> dict[str, str]:
    """Return the variables that make `home` a process's home folder, whatever this process's own is."""
    own = {name: value for name, value in os.environ.items() if name.startswith(PREFIX)}
    own |= {f"{PREFIX}HOME": str(home)}
    for name in (*BELOW_HOME, *OF_THE_SERVED):
        own.pop(PREFIX + name, None)
    libraries = load_settings(own).process_variables()
    return {**own, **{name: value for name, value in libraries.items() if str(home) in value}}


def settings_of(home: Path) -> Settings:
    """Return the settings of a process whose home folder is `home`."""
    environment = environment_of(home)
    return load_settings({name: value for name, value in environment.items() if name.startswith(PREFIX)})


def enter_home(home: Path) -> Settings:
    """Make `home` this process's and its children's home folder, and return its settings."""
    environment = environment_of(home)
    for name in (*BELOW_HOME, *OF_THE_SERVED):
        os.environ.pop(PREFIX + name, None)
    os.environ.update(environment)
    settings = load_settings()
    settings.prepare_environment()
    home.mkdir(parents=True, exist_ok=True, mode=0o700)
    return settings
