"""A service in the test's process: its exchanges, imported, have the ids of its log; and when it is ready."""

import asyncio
import json
import shutil
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from infra.artifacts import staged
from infra.querylog import QueryLog
from infra.registry import open_registry
from infra.settings import Settings, load_settings
from models.targets import describe
from models.targets.random import byte_tokenizer
from services.app import build_app
from services.config import ServiceConfig, read_as
from services.service import Service
from tasks.import_logs import import_logs
from tasks.register import identity
from tests.world import World

pytestmark = pytest.mark.engine

TEMPLATE = (
    "{%- if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{%- for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content or '' }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "{% if m.name %} ({{ m.name }}){% endif %}"
    "{% if not (loop.last and continue_final_message) %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}{% endif %}"
)
TOKENS = {one: byte_tokenizer().convert_tokens_to_ids(one) for one in ("a", "l", "<|im_end|>", "<|endoftext|>")}
MAX_LEN = 1024  # a tool takes a token a letter
USER = {"role": "user", "content": "hi"}
HE = {"role": "assistant", "content": "he"}
NOISE = {"max_tokens": 40, "temperature": 1, "seed": 1}
TOOL = {"type": "function", "function": {"parameters": {"type": "object", "properties": {}}, "name": "add"}}
CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
WROTE = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
HISTORY = [
    {"role": "system", "content": " "},
    USER,
    {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [CALL]},
    {"role": "tool", "content": [{"type": "text", "text": "1"}, {"type": "text", "text": "2"}], "tool_call_id": "1"},
]
PARTS = [
    {"role": "developer", "content": "d"},
    {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "ann"},
]


def says(text: str, *messages: dict[str, Any], **options: Any) -> dict[str, Any]:
    """A request whose answer is fixed by a grammar, because the target has random weights."""
    return {"messages": list(messages) or [USER], "structured_outputs": {"choice": [text]}, **options}


def ends_by(token: str) -> dict[str, Any]:
    allowed = {"allowed_token_ids": [TOKENS["a"], TOKENS[token]], "min_tokens": 3}
    return {"messages": [USER], "temperature": 1, "seed": 0, **allowed}


# Name of an exchange to its request, and to the reason that it is counted under; "" where it is imported.
EXCHANGES: dict[str, tuple[dict[str, Any], str]] = {
    "plain": (says("hello there"), ""),
    "parts": (says("hello", *PARTS), ""),
    "tools": (says("hello", tools=[TOOL]), ""),
    "no_tool": (says("hello", tools=[TOOL], tool_choice="none"), ""),
    "history": (says("it is 12", *HISTORY, tools=[TOOL]), ""),
    "thoughts": (says("<think>so</think>yes"), ""),
    "arguments": (says("hello", chat_template_kwargs={"enable_thinking": False}), ""),
    "effort": (says("hello", reasoning_effort="none"), ""),
    "goes_on": (says("llo", USER, HE, add_generation_prompt=False, continue_final_message=True), ""),
    "cut": (says("hello there", max_tokens=4), ""),
    "not_stopped": (says("hello", stop=["zzz"]), ""),
    "im_end": (ends_by("<|im_end|>"), ""),
    "endoftext": (ends_by("<|endoftext|>"), ""),
    "calls": (says(WROTE, tools=[TOOL]), "with tool calls in the answer"),
    "calls_ids": (says(WROTE, tools=[TOOL], return_token_ids=True), ""),
    "stopped": (says("hello there", stop=["lo t"]), "ended by a stop string"),
    "stopped_ids": (says("hello there", stop=["lo t"], return_token_ids=True), ""),
    "noise": ({"messages": [USER], **NOISE}, "with bytes that are no text in the answer"),
}


@pytest.fixture
def target(tiny_target: Path, tmp_path: Path) -> Path:
    """The tiny target with a template that shows all of a chat, and a second token that ends an answer."""
    directory = shutil.copytree(tiny_target, tmp_path / "shown")
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    settings = directory / "generation_config.json"
    ends = {"eos_token_id": [TOKENS["<|im_end|>"], TOKENS["<|endoftext|>"]]}
    settings.write_text(json.dumps({**json.loads(settings.read_text()), **ends}))
    return directory


@asynccontextmanager
async def running(world: World) -> AsyncIterator[tuple[Service, httpx.AsyncClient]]:
    """Run a world's service without Ray, and yield it with a client."""
    service = await Service.start(read_as(ServiceConfig, world.config()))
    try:
        transport = httpx.ASGITransport(build_app(service))
        async with httpx.AsyncClient(transport=transport, base_url="http://here", headers=world.headers) as client:
            yield service, client
    finally:
        await service.close()


async def seen_of_all(world: World) -> dict[tuple[str, bool], dict[str, Any]]:
    """Return what a client has of each exchange, whole and streamed."""
    async with running(world) as (_, client):
        asked = [(name, stream) for name in EXCHANGES for stream in (False, True)]
        return {one: await exchange(client, *one) for one in asked}


async def exchange(client: httpx.AsyncClient, name: str, stream: bool) -> dict[str, Any]:
    """Ask, and return what a client has of it; the name is in the prompt, so that no two are the same."""
    asked, _ = EXCHANGES[name]
    named = [{"role": "system", "content": f"{name} {stream}"}, *asked["messages"]]
    request = {"model": "target", "max_tokens": 100, "temperature": 0, **asked, "messages": named}
    if stream:
        request |= {"stream": True, "stream_options": {"include_usage": True}}
    headers = {"X-Redraft-Log": "full", "X-Redraft-Domain": "trip"}
    answer = await client.post("/v1/chat/completions", json=request, headers=headers)
    assert answer.status_code == 200, (name, answer.text)
    return {"request": request, "response": answer.text if stream else answer.json()}


def test_an_imported_exchange_has_the_ids_of_the_served_row_or_a_counted_reason(
    target: Path,
    make_world: Callable[..., World],
    loop: asyncio.AbstractEventLoop,
    store: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    serve = {"tool_parser": "hermes", "structured": {"enabled": True}}
    engine = {"name": "vllm", "num_draft_tokens": 3, "max_model_len": MAX_LEN, "enforce_eager": True}
    shown = make_world(target, serve=serve, engine=engine)
    seen = loop.run_until_complete(seen_of_all(shown))
    served = dict(zip(seen, shown.wait_for_rows("trip", len(seen)), strict=True))

    shutil.copy(store, tmp_path)
    registry = open_registry(Settings(home=tmp_path))
    with staged(tmp_path / "target") as directory:
        shutil.copytree(shown.target, directory, dirs_exist_ok=True)
    version = registry.register("target", tmp_path / "target", identity(describe(shown.target)).to_tags())
    registry.promote("target", version.number)
    monkeypatch.setenv("REDRAFT_HOME", str(tmp_path))
    monkeypatch.setenv("REDRAFT_QUERYLOG", str(tmp_path / "imported.db"))
    file = tmp_path / "seen.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in seen.values()))
    report = import_logs.fn([file], max_len=MAX_LEN)

    reasons = Counter(EXCHANGES[name][1] for name, _ in seen)
    wanted = reasons.pop("")
    assert report.skipped == dict(reasons), report.first
    assert (report.num_added, report.num_repeated) == (wanted, 0)
    imported = {tuple(row.prompt_ids or ()): row for row in QueryLog(load_settings().querylog).rows(0, 10**9)}
    for (name, stream), own in served.items():
        row = imported.get(tuple(own.prompt_ids))
        assert (row is None) == bool(EXCHANGES[name][1]), (name, stream)
        if row is not None:
            assert row.completion_ids == own.completion_ids, (name, stream)
            texts = (row.prompt, row.completion, row.finish_reason)
            assert texts == (own.prompt, own.completion, own.finish_reason), (name, stream)
    for name, token in (("im_end", "<|im_end|>"), ("endoftext", "<|endoftext|>"), ("cut", "l")):
        assert served[name, True].completion_ids[-1] == TOKENS[token]


def test_it_is_ready_once_its_draft_was_tested_and_not_while_it_drains(
    make_world: Callable[..., World], tiny_target: Path, loop: asyncio.AbstractEventLoop
) -> None:
    world, body = make_world(tiny_target), json.dumps({"model": "target", "prompt": "one", "max_tokens": 4}).encode()

    async def ask() -> None:
        arrives = asyncio.Event()

        async def slowly() -> AsyncIterator[bytes]:
            yield body[:-1]
            await arrives.wait()
            yield body[-1:]

        async with running(world) as (service, client):

            async def unready() -> str:
                answer = await client.get("/readyz")
                return "" if answer.status_code == 200 else answer.json()["error"]["message"]

            assert await unready() == "not ready: the draft that the service started with is on probation"
            while await unready():
                await asyncio.sleep(0.1)
            assert service.status().proof is not None
            headers = {"Content-Type": "application/json"}
            asking = asyncio.create_task(client.post("/v1/completions", content=slowly(), headers=headers))
            while not service.admission.in_flight:
                await asyncio.sleep(0.01)
            draining = asyncio.create_task(service.drain())
            while not await unready():
                await asyncio.sleep(0.01)
            assert await unready() == "not ready: the service is shutting down"
            assert (await client.get("/health")).status_code == 200
            arrives.set()
            assert (await asking).json()["choices"][0]["finish_reason"] == "length"
            assert await draining == 0

    loop.run_until_complete(ask())
