"""The plugin of a stock vLLM server: a draft is replaced under load, or refused with nothing changed."""

import hashlib
import json
import logging
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file
from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.engine.async_llm import AsyncLLM

from infra.machine import openmp_preload
from infra.processes import Child, answers, free_port, wait_until
from infra.querylog import QueryLog
from infra.rollout_store import note_tested
from infra.settings import Settings
from models.core.drafting.draft_families import family_of
from models.core.evaluation.golden import Golden, save_golden
from models.engines import NotSwitchable
from models.engines.vllm import child_environment
from models.engines.vllm.attached import AttachedEngine, NoPlugin
from models.engines.vllm.redraft_vllm import EXTENSION, OLDEST, announce
from models.engines.vllm.redraft_vllm.routes import unsupported
from models.engines.vllm.redraft_vllm.served import TOKEN
from models.engines.vllm.redraft_vllm.swapper import Broken, Order, Refused, Swapper
from models.types import RolloutParams
from services.record import RecordConfig
from tests.conftest import make_draft
from tests.imports import ROOT
from tests.models.engines.answers import last_of
from tests.world import World

pytestmark = pytest.mark.engine

PLUGIN = ROOT / "models" / "engines" / "vllm" / "redraft_vllm"
SECRET = "attach-token"
MAX_TOKENS, NUM_STREAMS = 48, 8


def order(directory: Path, version: str = "2", **changed: object) -> dict[str, Any]:
    """Return what the route is sent for a draft."""
    weights = family_of(directory).vllm_weights(directory)
    assert weights is not None
    sha256 = hashlib.sha256(weights.file.read_bytes()).hexdigest()
    parameters = {name: [*parts] for name, parts in weights.parameters.items()}
    return {"version": version, "path": str(directory), "sha256": sha256, "parameters": parameters, **changed}


@pytest.fixture(scope="module")
def other_draft(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_draft(tiny_target, tmp_path_factory.mktemp("other"), seed=1)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The plugin as `pip install` leaves it in an environment."""
    folder = tmp_path_factory.mktemp("plugin")
    source = shutil.copytree(PLUGIN, folder / "source", ignore=shutil.ignore_patterns("__pycache__"))
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--target"]
    subprocess.run([*pip, str(folder / "site"), str(source)], check=True)
    return folder / "site"


class Server:
    """A stock server, asked over HTTP."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.client = httpx.Client(base_url=self.url, timeout=120, trust_env=False)

    def complete(self, prompt_ids: Sequence[int], max_tokens: int = MAX_TOKENS) -> str:
        body = {"model": "target", "prompt": list(prompt_ids), "max_tokens": max_tokens, "temperature": 0}
        answer = self.client.post("/v1/completions", json={**body, "ignore_eos": True})
        text: str = answer.raise_for_status().json()["choices"][0]["text"]
        return text

    def draft(self, token: str = SECRET) -> httpx.Response:
        return self.client.get("/redraft/draft", headers={"Authorization": f"Bearer {token}"})

    def swap(self, body: Mapping[str, Any]) -> httpx.Response:
        return self.client.post("/redraft/draft", json=body, headers={"Authorization": f"Bearer {SECRET}"})


@contextmanager
def serving(site: Path, target: Path, draft: Path, folder: Path) -> Iterator[Server]:
    """Run `vllm serve` with nothing of redraft on its path but the plugin."""
    port = free_port()
    speculation = {**family_of(draft).vllm_config(draft), "num_speculative_tokens": 3}
    argv = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(target)),
        *("--served-model-name", "target", "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32"),
        *("--enforce-eager", "--max-model-len", "1024", "--max-num-seqs", "16", "--block-size", "32"),
        *("--per-request-spec-decode-metrics", "detailed"),
        *("--worker-extension-cls", EXTENSION, "--speculative-config", json.dumps(speculation)),
    ]
    environment = {**child_environment(), **openmp_preload(), "PYTHONPATH": str(site), TOKEN: SECRET}
    environment |= {"VLLM_PLUGINS": "redraft,redraft_notice"}
    with Child.start(argv, environment, folder / f"{port}.log", "vLLM's server") as child:
        wait_until(lambda: answers(f"http://127.0.0.1:{port}/health"), 600, child, "vLLM's server")
        server = Server(port)
        yield server
        server.client.close()


@pytest.fixture(scope="module")
def server(
    site: Path, tiny_target: Path, tiny_draft: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    with serving(site, tiny_target, tiny_draft, tmp_path_factory.mktemp("server")) as server:
        yield server


def prompts(number: int) -> list[list[int]]:
    rng = torch.Generator().manual_seed(3)
    return [torch.randint(3, 259, (24,), generator=rng).tolist() for _ in range(number)]


def test_a_draft_is_replaced_under_running_requests_and_changes_no_text(server: Server, other_draft: Path) -> None:
    asked = prompts(NUM_STREAMS)
    before = [server.complete(ids) for ids in asked]
    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        running = [pool.submit(server.complete, ids) for ids in asked * 3]
        told = server.swap(order(other_draft))
        texts = [one.result() for one in running]
    assert told.status_code == 200, told.text
    found = told.json()
    assert (found["version"], found["digest"]) == ("2", order(other_draft)["sha256"])
    assert found["worst"] < 1e-3
    assert texts == before * 3
    server.complete(asked[0])
    seen = server.draft().json()
    assert seen["version"] == "2" and (since := seen["since"])["drafted"] > 0
    assert since["accepted"] == sum(since[f"accepted_{place}"] for place in range(3))


def without_norm(body: dict[str, Any], tmp: Path) -> dict[str, Any]:
    copy = shutil.copytree(body["path"], tmp / "copy")
    tensors = load_file(Path(body["path"], "model.safetensors"))
    del tensors["norm.weight"]
    save_file(tensors, copy / "model.safetensors")
    return order(copy)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda body, tmp: {**body, "sha256": "0" * 64}, "wanted " + "0" * 64),
        (lambda body, tmp: {**body, "path": str(tmp / "absent")}, "FileNotFoundError"),
        (lambda body, tmp: {**body, "parameters": {"model.absent": ["fc.weight"]}}, "no parameter model.absent"),
        (without_norm, "norm.weight is None"),
    ],
    ids=["digest", "absent", "parameter", "missing"],
)
def test_what_does_not_fit_is_refused_and_changes_nothing(
    server: Server, other_draft: Path, tmp_path: Path, spoil: Any, said: str
) -> None:
    before = server.draft().json()
    text = server.complete(prompts(1)[0])
    told = server.swap(spoil(order(other_draft, "3"), tmp_path))
    message = told.json()["error"]["message"]
    assert (told.status_code, message.startswith("rank 0: ")) == (409, True)
    assert said in message
    after = server.draft().json()
    assert [after[name] for name in ("version", "digest")] == [before[name] for name in ("version", "digest")]
    assert server.complete(prompts(1)[0]) == text


def test_who_has_no_token_or_sends_something_else_is_told(server: Server, other_draft: Path) -> None:
    assert server.draft("another").status_code == 401
    assert server.client.post("/redraft/draft", json=order(other_draft)).status_code == 401
    assert server.swap({"version": "3"}).status_code == 400
    assert server.swap({**order(other_draft), "unknown": 1}).status_code == 400
    headers = {"Authorization": f"Bearer {SECRET}"}
    assert server.client.post("/redraft/speculation", headers=headers).status_code == 501
    assert server.client.post("/collective_rpc", json={"method": "redraft_discard"}).status_code == 404


def test_a_draft_that_is_in_memory_is_put_back_where_none_can_be_fetched(
    server: Server, tiny_target: Path, tiny_draft: Path, other_draft: Path, tmp_path: Path
) -> None:
    assert [server.swap(order(draft)).status_code for draft in (tiny_draft, other_draft)] == [200, 200]

    def fetched(draft: Path, version: str) -> httpx.Response:
        told = {name: value for name, value in order(draft, version).items() if name != "path"}
        return server.swap({**told, "url": f"http://127.0.0.1:{free_port()}/draft?signature=s", "size": 1})

    for draft, version in ((tiny_draft, "6"), (other_draft, "7")):
        found = fetched(draft, version).json()
        assert (found["version"], found["digest"]) == (version, order(draft)["sha256"]) and found["worst"] < 1e-3
    told = fetched(make_draft(tiny_target, tmp_path, seed=2), "8")
    assert told.status_code == 502 and "draft 8 could not be fetched: ConnectionError" in told.text
    assert server.draft().json()["version"] == "7"


def test_old_keys_remain_for_as_long_as_requests_run_and_no_longer(server: Server, tiny_draft: Path) -> None:
    shared = prompts(1)[0] * 20
    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        running = [pool.submit(server.complete, shared, 400) for _ in range(NUM_STREAMS)]
        told = server.swap(order(tiny_draft, "4"))
        assert not any(one.done() for one in running)
        states = {told.json()["state"], server.draft().json()["state"]}
        for one in running:
            one.result()
    assert states == {"old keys remain"}
    wait_until(lambda: server.draft().json()["state"] == "serving", 20, None, "an empty prefix cache")


def test_servers_follow_the_registry_one_first_and_a_draft_that_lies_is_taken_back(
    server: Server, site: Path, tiny_target: Path, tiny_draft: Path, tmp_path: Path
) -> None:
    target = shutil.copytree(tiny_target, tmp_path / "target")
    goldens = []
    for ids in prompts(4):
        body = {"model": "target", "prompt": ids, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
        answer = server.client.post("/v1/completions", json={**body, "return_token_ids": True}).json()
        said = tuple(answer["choices"][0]["token_ids"])
        goldens.append(Golden(prompt_ids=tuple(ids), token_ids=said, gaps=(1.0,) * len(said)))
    save_golden(target, goldens, threshold=1e-2)
    (home := tmp_path / "home").mkdir()
    world = World(home, target, serve={"rollout": {"waves": [1.0], "pause_s": 0.0}})
    first, second = world.versions
    argv = [sys.executable, "-m", "services.attach", "--config", str(home / "attach.json")]
    environment = {"PYTHONPATH": str(ROOT), TOKEN: SECRET}
    seen: list[tuple[str, str]] = []  # of both servers, again and again

    def have(version: int) -> bool:
        later = other.draft().json()["version"]  # asked before the first one, which must have had it by then
        seen.append((server.draft().json()["version"], later))
        return seen[-1] == (str(version), str(version))

    def wait_for(version: int) -> None:
        wait_until(lambda: have(version), 90, child, f"draft {version}")

    def wait_for_canary(version: int) -> None:
        wait_until(lambda: have(version) or seen[-1][0] == str(version), 90, child, f"draft {version} on one server")

    with serving(site, tiny_target, tiny_draft, tmp_path) as other:
        config = {**json.loads(world.config().read_text()), "servers": [server.url, other.url]}
        config["weights_url"] = f"http://127.0.0.1:{free_port()}"
        (home / "attach.json").write_text(json.dumps(config))
        with Child.start(argv, environment, home / "attach.log", "what follows the registry") as child:
            wait_for(first)
            world.registry.promote("draft", second)
            wait_for_canary(second)
            note_tested(world.querylog, world.registry.get("draft", second), RolloutParams())
            wait_for(second)
            assert (str(first), str(second)) not in seen
            world.registry.promote("draft", worse := world.register(3))
            wait_for_canary(worse)
            world.registry.revert("draft", worse, "worse on the same requests")  # as the post-promotion test does
            wait_for(second)
            assert str(worse) not in {later for _, later in seen}
            liar = world.register(2, golden_tau="3.9")
            world.registry.promote("draft", liar)
            wait_until(
                lambda: not have(liar) and world.registry.get("draft", liar).quarantined != "",
                90,
                child,
                "a quarantine",
            )
            quarantined = world.registry.get("draft", liar).quarantined
            assert quarantined.startswith("failed where the last good draft passed right after: ")
            assert "promised 3.900" in quarantined and str(liar) not in {later for _, later in seen}
            wait_for(second)
            assert server.swap(order(world.make(0), "by hand")).status_code == 200  # as after a restart
            wait_for(second)


GREEDY = {"max_tokens": 24, "temperature": 0, "ignore_eos": True}
CHAT = {"messages": [{"role": "user", "content": "write to ann"}], **GREEDY}
ASKED: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", CHAT | {"stream": True}),
    ("/v1/chat/completions", CHAT),
    ("/v1/completions", {"prompt": prompts(1)[0], "stream": True, **GREEDY}),
    ("/v1/chat/completions", CHAT | {"stream": True, "n": 2}),
    ("/v1/chat/completions", CHAT | {"stream": True, "max_tokens": -1}),
    ("/v1/completions", {"prompt": "hi", "echo": True, **GREEDY}),
]


def test_a_recorder_changes_no_answer_and_logs_the_servers_own_ids(
    server: Server, tiny_target: Path, tmp_path: Path
) -> None:
    port, settings = free_port(), Settings(home=tmp_path / "home")
    config = RecordConfig(
        server=server.url, models=("target",), port=port, target_dir=tiny_target, target_version=1, settings=settings
    )
    (tmp_path / "record.json").write_text(config.model_dump_json())
    argv = [sys.executable, "-m", "services.record", "--config", str(tmp_path / "record.json")]
    environment = {"PYTHONPATH": str(ROOT), TOKEN: SECRET}

    def said(url: str, path: str, body: dict[str, Any]) -> bytes:
        answer = server.client.post(url + path, json={"model": "target", **body}, headers={"X-Redraft-Log": "full"})
        return re.sub(rb'"id":"[^"]*"|"created":\d+', b"", answer.content)

    with Child.start(argv, environment, tmp_path / "record.log", "the recorder") as child:
        recorder = f"http://127.0.0.1:{port}"
        wait_until(lambda: answers(f"{recorder}/health"), 60, child, "the recorder")
        for path, body in ASKED:
            assert said(recorder, path, body) == said(server.url, path, body), body
        asked = {"model": "target", **ASKED[1][1], "return_token_ids": True}
        told = server.client.post("/v1/chat/completions", json=asked).json()
    log = QueryLog(settings.querylog)
    rows = log.latest(9)
    log.close()
    assert len(rows) == 3
    serves = server.draft().json()
    version = int(serves["version"]) if serves["version"].isdigit() else None
    assert {(row.server, row.draft_version) for row in rows} == {(serves["server"], version)}
    for row in rows[:2]:
        assert row.prompt_ids == told["prompt_token_ids"]
        assert row.completion_ids == told["choices"][0]["token_ids"]
    for row in rows:
        assert row.drafted and row.accepted is not None and row.speculating
        assert sum(row.accepted) + len(row.accepted) + 1 >= len(row.completion_ids or ()) == 24


async def test_a_server_without_the_plugins_token_is_told_what_is_missing(server: Server) -> None:
    engine = AttachedEngine(server.url, "another")
    try:
        with pytest.raises(NoPlugin, match=f"answers 401.*{EXTENSION}"):
            await engine.look()
        with pytest.raises(NotSwitchable):
            await engine.set_speculation(False)
    finally:
        await engine.close()


CONFIG = SimpleNamespace(
    parallel_config=SimpleNamespace(worker_extension_cls=EXTENSION, data_parallel_size=1, pipeline_parallel_size=1),
    speculative_config=SimpleNamespace(draft_model_config=SimpleNamespace(model=str(PLUGIN))),
    observability_config=SimpleNamespace(per_request_spec_decode_metrics="detailed"),
    lora_config=None,
    kv_transfer_config=None,
)


@pytest.fixture
def _token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN, SECRET)


@pytest.mark.usefixtures("_token")
@pytest.mark.parametrize(
    ("part", "changed", "said"),
    [
        ("parallel_config", {"worker_extension_cls": ""}, f"--worker-extension-cls {EXTENSION}"),
        ("observability_config", {"per_request_spec_decode_metrics": "summary"}, "--per-request-spec-decode-metrics"),
        ("parallel_config", {"data_parallel_size": 2}, "several engines"),
        ("parallel_config", {"pipeline_parallel_size": 2}, "pipeline parallelism"),
        ("speculative_config", {"draft_model_config": SimpleNamespace(model="some/name")}, "some/name"),
        ("", {"speculative_config": None}, "--speculative-config"),
        ("", {"lora_config": object()}, "LoRA"),
        ("", {"kv_transfer_config": object()}, "KV connectors"),
    ],
)
def test_a_server_of_another_kind_is_refused_in_a_line(part: str, changed: dict[str, object], said: str) -> None:
    whole = {part: SimpleNamespace(**{**vars(getattr(CONFIG, part)), **changed})} if part else changed
    [reason] = unsupported(SimpleNamespace(**{**vars(CONFIG), **whole}), SimpleNamespace())
    assert said in reason


@pytest.mark.usefixtures("_token")
def test_a_server_without_a_token_or_with_several_front_ends_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert unsupported(CONFIG, SimpleNamespace()) == []
    [reason] = unsupported(CONFIG, SimpleNamespace(api_server_count=2))
    assert "several API servers" in reason
    monkeypatch.delenv(TOKEN)
    assert unsupported(CONFIG, SimpleNamespace()) == [f"{TOKEN} is not set"]


@pytest.mark.usefixtures("_token")
@pytest.mark.parametrize(("version", "known"), [((0, 30, 1), False), (OLDEST, True), ((0, 0, "dev"), True)])
def test_a_release_that_lacks_what_is_used_is_refused(
    version: tuple[int | str, ...], known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vllm.__version_tuple__", version)
    monkeypatch.setattr("vllm.__version__", ".".join(map(str, version)))
    assert unsupported(CONFIG, SimpleNamespace()) == ([] if known else ["vLLM 0.30.1 is older than 0.31"])


@pytest.mark.parametrize(("allowed", "said"), [(None, "VLLM_PLUGINS"), ("another", "redraft")])
def test_a_start_says_which_plugins_are_left_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, site: Path, allowed: str | None, said: str
) -> None:
    monkeypatch.syspath_prepend(str(site))
    if allowed is None:
        monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    else:
        monkeypatch.setenv("VLLM_PLUGINS", allowed)
    with caplog.at_level(logging.WARNING, "vllm.redraft"):
        announce()
    assert said in caplog.text


class Vanishing(Swapper):
    """Removes the folder of a draft as soon as it is staged."""

    async def stage(self, order: Order) -> None:
        await super().stage(order)
        shutil.rmtree(order.path)


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="two ranks need two cores")
async def test_two_ranks_commit_together_or_not_at_all(
    tiny_target: Path, tiny_draft: Path, other_draft: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")  # this process may keep to one of them
    args = AsyncEngineArgs(
        model=str(tiny_target),
        dtype="float32",
        enforce_eager=True,
        max_model_len=256,
        max_num_seqs=8,
        tensor_parallel_size=2,
        distributed_executor_backend="mp",
        block_size=32,
        worker_extension_cls="tests.models.engines.faulty_rank.Faulty",
        speculative_config={**family_of(tiny_draft).vllm_config(tiny_draft), "num_speculative_tokens": 3},
    )
    engine = AsyncLLM.from_engine_args(args)

    async def text() -> list[int]:
        params = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)
        last = await last_of(SimpleNamespace(llm=engine), prompts(1)[0], params, os.urandom(4).hex())
        return list(last.outputs[0].token_ids)

    try:
        said, swapper = await text(), Vanishing(engine)
        copy = shutil.copytree(other_draft, tmp_path / "copy")
        with pytest.raises(Refused, match="rank 1: .*FileNotFoundError"):
            await Swapper(engine).swap(Order(**order(copy, "unreadable")))
        found = await swapper.swap(Order(**order(copy)))
        assert (found["version"], found["state"]) == ("2", "serving") and found["worst"] < 1e-3
        assert not copy.exists() and await text() == said
        (tmp_path / "third").mkdir()
        third = make_draft(tiny_target, tmp_path / "third", seed=2)
        with pytest.raises(Refused, match="is off by"):
            await Swapper(engine).swap(Order(**order(third, "stale")))
        digests = [one["digest"] for one in await engine.collective_rpc("redraft_discard")]
        assert digests == [order(other_draft)["sha256"]] * 2
        answers = await engine.collective_rpc("redraft_verify", args=("lm_head.weight",))
        assert [(one["rank"], one["ok"], one["worst"] < 1e-3) for one in answers] == [(0, True, True), (1, True, True)]
        assert await text() == said
        await engine.sleep(1)
        with pytest.raises((Refused, Broken)):
            await swapper.swap(Order(**order(tiny_draft, "5")))
    finally:
        engine.shutdown()
