"""A registry with drafts of a tiny target, and the real service that follows it, for tests and drills."""

import asyncio
import json
import shutil
import ssl
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import openai

from infra.artifacts import staged
from infra.home import SERVING
from infra.keys import add_key, bring_keys, operator_key
from infra.machine import openmp_preload
from infra.processes import Child, answers, free_port, wait_until
from infra.querylog import QueryLog
from infra.registry import open_registry
from infra.settings import Settings
from models.core.drafting.draft_families import family_named, open_draft
from models.core.evaluation.golden import Golden, save_golden
from models.engines import Sampling
from models.targets import describe
from tasks.measure_draft import measure_golden
from tests.conftest import make_draft
from tests.models.drafts.tiny import save_tiny
from tests.tags import tags_for

KEY, OTHER_KEY = "the-key-of-team-one", "the-key-of-team-two"
MODEL = "target"
MAX_TOKENS = 48
MAX_MODEL_LEN = 256
START_TIMEOUT_S = 240.0
# Nobody here speaks it, and a client that makes its own takes longer for that than for most requests.
TLS = ssl.create_default_context()
PROMPTS = [f"question {number}: what is {number} times {number + 1}?" for number in range(8)]


class Served:
    """A service that runs somewhere.

    Attributes:
        url: where.
        operator: headers of an operator.
    """

    def __init__(self, url: str, home: Path) -> None:
        self.url, self.operator = url, {"Authorization": f"Bearer {operator_key(home)}"}

    def client(self, key: str = KEY) -> openai.OpenAI:
        """Return the stock client, without its retries."""
        http_client = openai.DefaultHttpxClient(verify=TLS)
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, http_client=http_client)

    def status(self) -> dict[str, Any]:
        """Return what the service says of itself; httpx.HTTPError if it says nothing."""
        url = f"{self.url}/redraft/status"
        answer = httpx.get(url, headers=self.operator, timeout=60, verify=TLS, trust_env=False)
        return dict(answer.raise_for_status().json())

    def wait_for(self, what: str, holds: Callable[[dict[str, Any]], bool], timeout_s: float = 60.0) -> dict[str, Any]:
        """Wait until the service's status is as wanted, and return it; a service that is away is waited for."""
        until, seen = time.monotonic() + timeout_s, None
        while time.monotonic() < until:
            with suppress(httpx.HTTPError):
                seen = self.status()
                if holds(seen):
                    return seen
            time.sleep(0.1)
        raise AssertionError(f"{what}: {seen}")

    def wait_for_draft(self, number: int, timeout_s: float = 60.0) -> None:
        """Wait until the service serves a draft that passed its probation."""
        self.wait_for(f"draft {number}", lambda status: str(status["draft_version"]) == str(number), timeout_s)

    def wait_for_refusal(self, number: int) -> str:
        """Wait until the service refused a draft, and return why."""

        def why(status: dict[str, Any]) -> str:
            return next((told for name, told in status["refused"].items() if name.startswith(f"{number}-")), "")

        return why(self.wait_for("refusal", lambda status: why(status) != ""))


class World(Served):
    """A target, a registry and a service in one folder.

    Attributes:
        headers: of a client.
        flooder: key of a client who asks too much.
        versions: two drafts, each with an honest promise; the first one is the champion at the start.
    """

    def __init__(
        self,
        home: Path,
        target: Path,
        registry_uri: str = "",
        serve: dict[str, Any] | None = None,
        family: str = "eagle3",
        cache: Path | None = None,
        **config: Any,
    ) -> None:
        """Register two drafts and promote the first.

        Args:
            home: an empty folder.
            target: with its golden outputs, see `make_target`.
            registry_uri: of a running MLflow server; by default a database in the folder.
            serve: keys of its table "serve" that differ.
            family: of its drafts.
            cache: where the service keeps what it downloads; by default a folder in the home.
            config: other settings of the service that differ.
        """
        self.home, self.target, self.family = home, target, family
        self.querylog = home / "log" / "queries.db"
        uri = registry_uri or f"sqlite:///{home}/mlflow.db"
        self.settings = Settings(home=home, mlflow_uri=uri, querylog=self.querylog, cache=cache or home / "cache")
        self.registry = open_registry(self.settings)
        self.port = free_port()
        super().__init__(f"http://127.0.0.1:{self.port}", home)
        self.headers = {"Authorization": f"Bearer {KEY}"}
        self.flooder = add_key(home / "keys.json", "flooder", "client")
        bring_keys(home / "keys.json", [(KEY, None), (OTHER_KEY, "full")])
        self.serve, self._changed = serve or {}, config
        self.versions = [self.register(seed) for seed in (0, 1)]
        self.registry.promote("draft", self.versions[0])

    def make(self, seed: int) -> Path:
        """Make a draft's directory, with its manifest."""
        directory = self.home / "made" / str(seed)
        with staged(directory) as staging:
            if self.family == "eagle3":
                make_draft(self.target, staging, seed)
            else:
                save_tiny(family_named(self.family), self.target, staging, seed, served=True)
            (staging / "manifest.json").unlink()
        return directory

    def register(self, seed: int, **changed: str) -> int:
        """Register a draft, with an honest promise unless `changed` says otherwise."""
        directory = self.make(seed)
        golden_tau = measure_golden(open_draft(directory, self.target), self.target, 3, self.home / "golden")
        return self.register_files(directory, **{"golden_tau": str(golden_tau)} | changed)

    def register_files(self, directory: Path, **changed: str) -> int:
        """Register whatever a directory holds as a draft for the target."""
        return self.registry.register("draft", directory, tags_for(describe(self.target), **changed)).number

    def champion(self) -> int | None:
        found = self.registry.champion("draft")
        return None if found is None else found.number

    def config(self) -> Path:
        """Write the service's settings."""
        file = self.home / "service.json"
        serve = {"poll_s": 0.2, "min_swap_interval_s": 0.2, "limits": {"body_timeout_s": 5.0}, **self.serve}
        config = {
            "target_dir": str(self.target),
            "settings": self.settings.model_dump(mode="json"),
            "engine": {
                "name": "vllm",
                "num_draft_tokens": 3,
                "max_model_len": MAX_MODEL_LEN,
                "max_num_seqs": 16,
                "enforce_eager": True,
            },
            "serve": {"port": self.port, **serve},
        }
        file.write_text(json.dumps(config | self._changed))
        return file

    def start(self) -> Child:
        """Start the service and wait until it answers."""
        argv = [sys.executable, "-m", "services.main", "--config", str(self.config())]
        env, log = openmp_preload() | {"REDRAFT_HOME": str(self.home)}, self.home / "service.log"
        begins = log.stat().st_size if log.exists() else 0

        def serves() -> bool:  # itself: in a cluster a killed one may still answer at its address
            return SERVING.encode() in log.read_bytes()[begins:] and answers(f"{self.url}/health")

        child = Child.start(argv, env, log, "the service")
        try:
            wait_until(serves, START_TIMEOUT_S * self.serve.get("num_replicas", 1), child, "the service")
        except BaseException:
            child.stop()
            raise
        return child

    def wait_for_rows(self, domain: str, count: int) -> list[Any]:
        """Wait until the query log has so many rows of a domain with full consent, and return them."""
        log = QueryLog(self.querylog)
        until = time.monotonic() + 60
        while len(rows := [row for row in log.rows(0, 10**9) if row.domain == domain]) < count:
            assert time.monotonic() < until, f"{len(rows)} rows of {domain}"
            time.sleep(0.1)
        log.close()
        return rows


def make_target(
    tiny_target: Path, directory: Path, engine: Any, loop: asyncio.AbstractEventLoop, num_golden: int = 4
) -> None:
    """Copy the session's target and save what its engine says without speculation."""
    shutil.copytree(tiny_target, directory)

    async def golden() -> list[Golden]:
        await engine.set_speculation(False)
        sampling = Sampling(max_tokens=24, num_logprobs=2, ignore_eos=True)
        outputs = [await engine.generate([7 + n, 30, 12, 44 - n], sampling, f"golden-{n}") for n in range(num_golden)]
        await engine.set_speculation(True)
        return [Golden(prompt_ids=o.prompt_ids, token_ids=o.token_ids, gaps=o.gaps) for o in outputs]

    save_golden(directory, loop.run_until_complete(golden()), threshold=1e-2)


def ask(client: openai.OpenAI, prompt: str, **options: Any) -> Any:
    """Ask greedily."""
    messages = [{"role": "user", "content": prompt}]
    settings = {"max_tokens": MAX_TOKENS, "temperature": 0} | options
    return client.chat.completions.create(model=MODEL, messages=messages, **settings)


def stream_text(client: openai.OpenAI, prompt: str, **options: Any) -> tuple[str, str | None, dict[str, Any]]:
    """Ask greedily for a stream; return text, finish reason and what the usage says beyond OpenAI's."""
    text, finish, usage = "", None, {}
    for chunk in ask(client, prompt, stream=True, stream_options={"include_usage": True}, **options):
        for choice in chunk.choices:
            text += choice.delta.content or ""
            finish = choice.finish_reason or finish
        if chunk.usage is not None:
            usage = chunk.usage.model_extra or {}
    return text, finish, usage
