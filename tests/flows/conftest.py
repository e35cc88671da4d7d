"""A home folder with a tiny build in it, and the command line as a real process."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 400


class Cli:
    """Runs `redraft` in one home folder."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self._env = {name: value for name, value in os.environ.items() if not name.startswith(("REDRAFT_", "PREFECT_"))}
        self._env |= {"REDRAFT_HOME": str(home), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """Start a command in a process group of its own; its output goes to one pipe."""
        return subprocess.Popen(
            [sys.executable, "-m", "flows.cli", *arguments],
            env=self._env,
            text=True,
            start_new_session=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    def run(self, *arguments: str) -> str:
        """Run a command that must succeed, and return its output."""
        with self.start(*arguments) as process:
            output, _ = process.communicate(timeout=TIMEOUT_S)
        assert process.returncode == 0, output
        return output


@pytest.fixture
def cli_in() -> Callable[[Path], Cli]:
    """Return what makes a command line for a home folder."""
    return Cli


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Cli, str]:
    """Return a home with a finished tiny build, and what the build said. Tests copy it before they change it."""
    cli = Cli(tmp_path_factory.mktemp("built") / "home")
    return cli, cli.run("build", "--recipe", "tiny")
