"""A server that records itself: `vllm serve --middleware` loads the recorder, with the same law as before a server."""

import asyncio
import json
import shlex
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Message

from infra.querylog import QueryLog
from infra.service_process import write_recording
from infra.settings import ATTACH_TOKEN, RECORD_CONFIG, Settings, load_settings
from models.engines.vllm.redraft_vllm.served import TellingMiddleware
from models.engines.vllm.redraft_vllm.swapper import Swapper
from models.params import validate
from models.targets.random import byte_tokenizer
from services.record import RecordedServer, RecordedTarget
from services.recording_middleware import STATUS_PATH
from tests.conftest import ODD_NAME
from tests.services import played

pytestmark = pytest.mark.anyio


def server(steps: list[played.Step], told: dict[str, Any] | None = None, breaks: bool = False) -> Starlette:
    """Return an app that answers as vLLM's with the plugin."""
    told = {name: value for name, value in (told or {}).items() if name != "piece"}

    async def answer(request: Request) -> Response:
        body = await request.json()
        if not body.get("stream"):
            return Response(played.whole(body, steps), media_type="application/json")

        async def events() -> AsyncIterator[bytes]:
            for frame in played.frames(body, steps, **told):
                yield frame
            if breaks:
                raise RuntimeError("the engine died")

        return StreamingResponse(events(), media_type="text/event-stream")

    paths = ("/v1/chat/completions", "/v1/completions")
    app = Starlette(routes=[Route(path, answer, methods=["POST"]) for path in paths])
    app.add_middleware(TellingMiddleware)
    app.state.redraft_swapper = Swapper(None, server="host:8000")
    app.state.redraft_swapper.version = "7"
    return app


@asynccontextmanager
async def recorded(app: Starlette, home: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[httpx.AsyncClient]:
    """Run an app that records itself as uvicorn does: its lifespan goes on while it is asked."""
    byte_tokenizer().save_pretrained(home / "target")
    told = {"models": ["target"], "target_dir": str(home / "target"), "target_version": 3}
    (home / "record.json").write_text(json.dumps(told | {"settings": Settings(home=home).model_dump(mode="json")}))
    monkeypatch.setenv(RECORD_CONFIG, str(home / "record.json"))
    monkeypatch.setenv(ATTACH_TOKEN, "token")
    app.add_middleware(RecordedServer)
    said, answered = asyncio.Queue[Message](), asyncio.Queue[str]()
    said.put_nowait({"type": "lifespan.startup"})

    async def send(message: Message) -> None:
        answered.put_nowait(message["type"])

    living = asyncio.create_task(app({"type": "lifespan", "state": {}}, said.get, send))  # type: ignore[arg-type]
    async with (
        asyncio.timeout(played.WAIT_S),
        httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://a") as http,
    ):
        assert await answered.get() == "lifespan.startup.complete"
        yield http
        said.put_nowait({"type": "lifespan.shutdown"})
        assert await answered.get() == "lifespan.shutdown.complete"
        living.cancel()  # as it is with the loop that ends


@pytest.mark.parametrize("law", ["a chat", "usage in every chunk", "two choices", "a whole completion"])
async def test_with_and_without_it_a_client_gets_the_same_bytes(
    tmp_path: Path, law: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    body, steps, told, learnt = played.LAWS[law]
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    async with httpx.AsyncClient(transport=httpx.ASGITransport(server(steps, told)), base_url="http://a") as http:
        direct = await http.post(path, json=body)
    async with recorded(server(steps, told), tmp_path, monkeypatch) as http:
        passed = await http.post(path, json=body, headers=played.FULL)
        assert (passed.status_code, passed.content, passed.headers) == (200, direct.content, direct.headers)
        assert (await http.get(STATUS_PATH)).status_code == 401
    with closing(QueryLog(Settings(home=tmp_path).querylog)) as log:
        rows = log.latest(2)
    assert [(row.prompt_ids, row.completion_ids, row.server, row.draft_version) for row in rows] == (
        [(played.PROMPT_IDS, [one for step in steps for one in step.ids], "host:8000", 7)] if learnt else []
    )


async def test_an_answer_that_the_server_breaks_off_is_no_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with recorded(server(played.STEPS, breaks=True), tmp_path, monkeypatch) as http:
        with pytest.raises(RuntimeError, match="the engine died"):
            await http.post("/v1/chat/completions", json=played.CHAT | played.STREAM, headers=played.FULL)
        assert (await played.status_of(http, tmp_path))["passed"] == {"an answer that was cut": 1}


async def test_without_the_file_it_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(RECORD_CONFIG, raising=False)
    with pytest.raises(ValueError, match=f"set {RECORD_CONFIG} to the file"):
        RecordedServer(server(played.STEPS))


def test_what_it_is_told_lies_in_the_home_without_keys(tmp_path: Path) -> None:
    told = {"models": ["target"], "target_dir": str(tmp_path), "target_version": 3}
    (home := tmp_path / ODD_NAME).mkdir()
    said = write_recording(told, Settings(home=home, api_keys=["not-for-files"]))
    assert said.endswith(" vllm serve … --middleware services.record.RecordedServer")
    text = Path(shlex.split(said)[0].partition("=")[2]).read_text()
    assert validate(RecordedTarget, json.loads(text), "").models == ("target",)
    assert "not-for-files" not in text


def test_what_is_told_to_an_attached_server_is_no_setting() -> None:
    assert load_settings({ATTACH_TOKEN: "secret", RECORD_CONFIG: "file"}) == Settings()
