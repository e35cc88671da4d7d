"""A home folder with a tiny build in it, requests that its target answered, and the command line as a real process."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from infra.consent import QueryRow
from infra.home import SECRET_BYTES, SPLIT_KEY
from infra.processes import Child, answers, free_port, wait_until
from infra.registry import Registry, open_registry
from infra.settings import Settings, load_settings
from models.chats import ChatEncoder
from models.core.checkpoints.loading import load_model
from models.core.learning.answering import Ask, go_on
from models.recipe import load_recipe
from models.sources import Prompt
from models.targets import stop_ids
from tasks.select_data import choose_prompts
from tests.conftest import ODD_NAME
from tests.tasks.made import row_of

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 600
# What is started and ends by itself; at low priority on a core that another process keeps busy it gets a tenth of it.
ENDS_S = 400.0
# The first start of Prefect's server compiles a thousand modules: beside two workers that took a slow machine 140 s.
SERVER_S = 300
NUM_TOKENS = 24


class Cli:
    """Runs `redraft` in one home folder."""

    def __init__(self, home: Path, orchestrator: str = "", **variables: str) -> None:
        """Take a home folder, a Prefect server and variables; without a server each command starts its own."""
        self.home = home
        self.env = {name: value for name, value in os.environ.items() if not name.startswith(("REDRAFT_", "PREFECT_"))}
        self.env |= {"REDRAFT_HOME": str(home), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        self.env["PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS"] = str(SERVER_S)
        if orchestrator:
            self.env["PREFECT_API_URL"] = orchestrator
        self.env |= variables

    def start(self, *arguments: str, program: str = "flows.cli") -> subprocess.Popen[str]:
        """Start a command in a process group of its own; its output goes to one pipe."""
        return subprocess.Popen(
            [sys.executable, "-m", program, *arguments],
            env=self.env,
            cwd=self.home.parent,
            text=True,
            start_new_session=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    def run(self, *arguments: str, timeout_s: float = TIMEOUT_S, program: str = "flows.cli") -> str:
        """Run a command that must succeed, and return its output."""
        with self.start(*arguments, program=program) as process:
            output, _ = process.communicate(timeout=timeout_s)
        assert process.returncode == 0, output
        return output


@pytest.fixture(scope="session")
def orchestrator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Run a Prefect server, and return its API's address. A command with a server is ten seconds faster."""
    home, port = tmp_path_factory.mktemp("prefect"), free_port()
    url = f"http://127.0.0.1:{port}/api"
    variables = load_settings({"REDRAFT_HOME": str(home)}).process_variables() | {"PREFECT_API_URL": url}
    argv = [sys.executable, "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port)]
    with Child.start(argv, variables, home / "prefect.log", "prefect") as child:
        wait_until(lambda: answers(f"{url}/health"), SERVER_S, child, "the server")
        yield url


@pytest.fixture
def cli_in(orchestrator: str) -> Callable[[Path], Cli]:
    """Return what makes a command line for a home folder."""
    return partial(Cli, orchestrator=orchestrator)


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Cli, str]:
    """Return a home with a finished tiny build, and what the build said. Tests copy it before they change it."""
    user, temporary = (tmp_path_factory.mktemp(name) for name in ("user", "temporary"))
    (user / ".prefect").mkdir()  # a folder that is there is written to
    # A build asks nobody but its own servers, so it needs no proxy that answers.
    proxies = dict.fromkeys(("http_proxy", "HTTPS_PROXY", "ALL_PROXY"), "http://127.0.0.1:9")
    cli = Cli(tmp_path_factory.mktemp("built") / ODD_NAME, HOME=str(user), TMPDIR=str(temporary), **proxies)
    cli.home.mkdir()
    (cli.home / SPLIT_KEY).touch(0o600)
    (cli.home / SPLIT_KEY).write_bytes(bytes(SECRET_BYTES))  # every split is the same each time
    return cli, cli.run("build", "--recipe", "tiny")


@pytest.fixture(scope="session")
def target_dir(built, tmp_path_factory) -> Path:
    """Return the build's target."""
    registry = registry_of(built[0].home)
    return registry.download(registry.champion("target"), tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="session")
def rows(target_dir) -> list[QueryRow]:
    """Return requests of the domain "code" as the service would have logged them: answered by the build's target."""
    return answered(target_dir, choose_prompts("code", load_recipe("tiny").traffic["code"], seed=0)["requests"])


def answered(target_dir: Path, prompts: Sequence[Prompt], key: str | None = None) -> list[QueryRow]:
    """Return the rows that a service logs of prompts which one key asked."""
    encoder = ChatEncoder.of(AutoTokenizer.from_pretrained(target_dir))
    asks = [Ask(prompt.encode(encoder), NUM_TOKENS) for prompt in prompts]
    answers = go_on(load_model(target_dir), asks, stop_ids(target_dir), torch.Generator())
    told = {"finish_reason": "length", "sampling": {"temperature": 0.0}}
    return [
        row_of(prompt.id, domain=prompt.domain, key=key, prompt_ids=[*ask.token_ids], completion_ids=said, **told)
        for prompt, ask, said in zip(prompts, asks, answers, strict=True)
    ]


@pytest.fixture
def home(built, tmp_path) -> Path:
    """Return a copy of the build's home. The registry names its files by absolute path, so they stay where they are."""
    shutil.copytree(built[0].home, tmp_path / "home")
    return tmp_path / "home"


def registry_of(home: Path) -> Registry:
    """Return the registry of a home."""
    return open_registry(Settings(home=home))
