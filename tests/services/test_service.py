"""The whole service, as `python -m services.main` starts it: Ray Serve, vLLM, a registry; asked by the stock client."""

import asyncio
import json
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from infra.artifacts import staged
from infra.doctor import openmp_preload
from infra.processes import Child, answers, free_port, wait_until
from infra.querylog import QueryLog
from infra.registry import LINEAGE_TAGS, Registry
from models.drafts import open_draft
from models.engines import Sampling
from models.golden import Golden, save_golden
from models.targets import describe
from tasks.measure_draft import measure_probe
from tests.conftest import make_draft

pytestmark = pytest.mark.engine

NUM_SWAPS = 10
NUM_CLIENTS = 4
MAX_TOKENS = 48
PROMPTS = [f"question {number}: what is {number} times {number + 1}?" for number in range(8)]


class World:
    """A registry with drafts of a tiny target, and the service that follows it."""

    def __init__(self, home: Path, target: Path) -> None:
        self.home, self.target = home, target
        self.registry = Registry(f"sqlite:///{home}/mlflow.db", home / "artifacts")
        self.querylog = home / "queries.db"
        self.port = free_port("127.0.0.1")
        self.url = f"http://127.0.0.1:{self.port}"
        self.versions: list[int] = []

    def register(self, seed: int, **changed: str) -> int:
        """Register a draft, with an honest promise unless `changed` says otherwise."""
        directory = self.home / "made" / str(seed)
        with staged(directory) as staging:
            make_draft(self.target, staging, seed)
            (staging / "manifest.json").unlink()
        card = describe(self.target)
        tags = dict.fromkeys(LINEAGE_TAGS, "") | {
            "target_sha256": card.sha256,
            "tokenizer_sha256": card.tokenizer_sha256,
            "vocab_size": str(card.vocab_size),
            "probe_tau": str(measure_probe(open_draft(directory, self.target), self.target, 3, self.home / "probe")),
        }
        return self.registry.register("draft", directory, tags | changed).number

    def config(self) -> Path:
        file = self.home / "service.json"
        paths = {
            "target_dir": self.target,
            "artifact_root": self.home / "artifacts",
            "querylog": self.querylog,
            "cache": self.home / "cache",
            "state": self.home / "state.json",
        }
        engine = {"name": "vllm", "num_draft_tokens": 3, "max_model_len": 256, "max_num_seqs": 16}
        config = {name: str(path) for name, path in paths.items()} | {
            "registry_uri": f"sqlite:///{self.home}/mlflow.db",
            "engine": engine,
            "port": self.port,
            "poll_s": 0.2,
            "min_swap_interval_s": 0.2,
        }
        file.write_text(json.dumps(config))
        return file

    def status(self) -> dict[str, Any]:
        return dict(httpx.get(f"{self.url}/redraft/status", timeout=10, trust_env=False).json())

    def wait_for(self, what: str, holds: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        until = time.monotonic() + 60
        while not holds(status := self.status()):
            assert time.monotonic() < until, f"{what}: {status}"
            time.sleep(0.1)
        return status

    def wait_for_draft(self, number: int) -> None:
        self.wait_for(f"draft {number}", lambda status: str(status["draft_version"]) == str(number))


@pytest.fixture(scope="module")
def world(
    tiny_target: Path, engine: Any, loop: asyncio.AbstractEventLoop, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[World]:
    home = tmp_path_factory.mktemp("world")
    target = home / "target"
    shutil.copytree(tiny_target, target)

    async def golden() -> list[Golden]:
        await engine.set_speculation(False)
        sampling = Sampling(max_tokens=24, num_logprobs=2, ignore_eos=True)
        outputs = [await engine.generate([7 + n, 30, 12, 44 - n], sampling, f"golden-{n}") for n in range(4)]
        await engine.set_speculation(True)
        return [Golden(prompt_ids=o.prompt_ids, token_ids=o.token_ids, gaps=o.gaps) for o in outputs]

    save_golden(target, loop.run_until_complete(golden()), threshold=1e-2)
    world = World(home, target)
    world.versions = [world.register(seed) for seed in (0, 1)]
    world.registry.promote("draft", world.versions[0])
    argv = [sys.executable, "-m", "services.main", "--config", str(world.config())]
    with Child.start(argv, openmp_preload(), home / "service.log", "the service") as child:
        wait_until(lambda: answers(f"{world.url}/healthz"), 240, child, "the service")
        yield world


@pytest.fixture
def client(world: World) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{world.url}/v1", api_key="unused", max_retries=0) as client:
        yield client


def ask(client: openai.OpenAI, prompt: str, **options: Any) -> Any:
    messages = [{"role": "user", "content": prompt}]
    return client.chat.completions.create(
        model="target", messages=messages, max_tokens=MAX_TOKENS, temperature=0, **options
    )


def stream_text(client: openai.OpenAI, prompt: str) -> tuple[str, str | None, dict[str, Any]]:
    text, finish, usage = "", None, {}
    for chunk in ask(client, prompt, stream=True, stream_options={"include_usage": True}):
        for choice in chunk.choices:
            text += choice.delta.content or ""
            finish = choice.finish_reason or finish
        if chunk.usage is not None:
            usage = chunk.usage.model_extra or {}
    return text, finish, usage


def test_the_stock_client_chats_streams_and_lists_models(client: openai.OpenAI) -> None:
    whole = ask(client, PROMPTS[0])
    text, finish, usage = stream_text(client, PROMPTS[0])
    assert whole.choices[0].message.content == text
    assert finish in ("length", "stop")
    assert usage["redraft"]["steps"] > 0
    assert whole.usage.model_extra["redraft"]["drafted"] > 0
    assert [model.id for model in client.models.list().data] == ["target"]
    completion = client.completions.create(model="target", prompt="one two", max_tokens=8, temperature=0)
    assert completion.choices[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("options", "status"),
    [
        ({"model": "another"}, 404),
        ({"temperature": -1}, 400),
        ({"max_tokens": 10**6}, 400),
        ({"messages": []}, 400),
        ({"logit_bias": {"5": 3}}, 400),
        ({"extra_body": {"min_p": 0.2}}, 400),
        ({"extra_headers": {"X-Redraft-Domain": "../etc"}}, 400),
    ],
)
def test_a_bad_request_is_refused_in_openais_shape(client: openai.OpenAI, options: dict[str, Any], status: int) -> None:
    wanted = {"model": "target", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4} | options
    with pytest.raises(openai.APIStatusError) as caught:
        client.chat.completions.create(**wanted)
    assert caught.value.status_code == status
    assert caught.value.response.json()["error"]["message"]


def test_only_what_was_consented_to_is_logged(client: openai.OpenAI, world: World) -> None:
    ask(client, "secret of none", store=False, extra_headers={"X-Redraft-Log": "full"})
    ask(client, "secret of metadata")
    ask(client, "mail me at ada@example.org", extra_headers={"X-Redraft-Log": "full", "X-Redraft-Domain": "mail"})
    log = QueryLog(world.querylog)
    until = time.monotonic() + 10
    while log.stats().per_domain.get("mail", 0) < 1:
        assert time.monotonic() < until
        time.sleep(0.1)
    [row] = [row for row in log.rows(0, 10**9) if row.domain == "mail"]
    assert "[EMAIL]" in str(row.prompt)
    log.close()
    stored = b"".join(file.read_bytes() for file in world.home.glob("queries.db*"))
    assert b"secret of" not in stored
    assert b"ada@example.org" not in stored


def test_drafts_are_swapped_while_clients_stream_and_no_answer_changes(world: World, client: openai.OpenAI) -> None:
    wanted = {prompt: stream_text(client, prompt)[0] for prompt in PROMPTS}
    stop, failures, versions, count = threading.Event(), [], set(), [0] * NUM_CLIENTS

    def work(number: int) -> None:
        with openai.OpenAI(base_url=f"{world.url}/v1", api_key="unused", max_retries=0) as own:
            while not stop.is_set():
                prompt = PROMPTS[(count[number] + number) % len(PROMPTS)]
                try:
                    text, finish, usage = stream_text(own, prompt)
                except openai.OpenAIError as error:
                    failures.append(repr(error))
                    continue
                if finish is None or text != wanted[prompt]:
                    failures.append(f"{finish}: {text!r} instead of {wanted[prompt]!r}")
                versions.add(str(usage["redraft"]["draft_version"]))
                count[number] += 1

    before = world.status()["swaps"]
    clients = [threading.Thread(target=work, args=(number,)) for number in range(NUM_CLIENTS)]
    for thread in clients:
        thread.start()
    for number in range(NUM_SWAPS):
        version = world.versions[(number + 1) % 2]
        world.registry.promote("draft", version)
        world.wait_for_draft(version)
    stop.set()
    for thread in clients:
        thread.join()
    assert failures == []
    assert min(count) > 0
    assert versions == {str(version) for version in world.versions}
    assert world.status()["swaps"] - before >= NUM_SWAPS


def test_a_draft_that_accepts_less_than_it_promised_is_put_back(world: World, client: openai.OpenAI) -> None:
    good = world.status()["draft_version"]
    liar = world.register(2, probe_tau="3.9")
    world.registry.promote("draft", liar)
    status = world.wait_for("refusal", lambda status: any(name.startswith(f"{liar}-") for name in status["refused"]))
    [reason] = [reason for name, reason in status["refused"].items() if name.startswith(f"{liar}-")]
    assert "promised 3.9" in reason
    world.wait_for("put back", lambda status: status["draft_version"] == good and status["speculating"])
    champion = world.registry.champion("draft")
    assert champion is not None
    assert champion.number != liar
    assert stream_text(client, PROMPTS[0])[1] is not None


def test_a_draft_for_another_target_is_left_alone(world: World) -> None:
    good = world.status()["draft_version"]
    other = world.register(3, target_sha256="0" * 64)
    world.registry.promote("draft", other)
    time.sleep(2)
    assert world.status()["draft_version"] == good
    world.registry.promote("draft", int(good))


def test_speculation_can_be_switched_off_and_on(world: World, client: openai.OpenAI) -> None:
    text = stream_text(client, PROMPTS[1])[0]
    for on in (False, True):
        httpx.post(f"{world.url}/redraft/speculation", json={"on": on}, timeout=30, trust_env=False).raise_for_status()
        again, _, usage = stream_text(client, PROMPTS[1])
        assert again == text
        assert any(usage["redraft"]["drafted_per_step"]) is on


def test_metrics_count_requests_and_swaps(world: World) -> None:
    text = httpx.get(f"{world.url}/metrics", timeout=10, trust_env=False).text
    assert "redraft_mean_accepted_length" in text
    assert "vllm:" in text
