"""The recorder of somebody else's server: what a client gets is what the server says, and rows are what it said."""

import asyncio
import json
import os
import shutil
import signal
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from infra import scrub
from infra.consent import QueryRow
from infra.database import DatabaseTorn
from infra.home import RECORDER_HEALTH
from infra.keys import add_key
from infra.processes import Child, answers, free_port, wait_until
from infra.querylog import QueryLog
from infra.service_process import record_program
from infra.settings import Settings
from infra.supervisor import ProcessRecord, read_state
from models.chats import ChatEncoder
from models.engines.vllm.redraft_vllm.served import ASKED, COMMENT, TOLD, proof
from models.markers import Markers
from models.targets.random import byte_tokenizer
from services.frames import without_ids
from services.record import RecordConfig, main, record
from services.recording_middleware import STATUS_PATH
from tests.imports import ROOT
from tests.services import played

pytestmark = pytest.mark.anyio


def config(home: Path, url: str, **changed: Any) -> RecordConfig:
    (target := home / "target").mkdir(exist_ok=True)
    byte_tokenizer().save_pretrained(target)
    told = {"server": url, "models": ("target", "lora"), "port": free_port(), "target_dir": target}
    return RecordConfig(**{**told, "target_version": 3, "settings": Settings(home=home), **changed})


@pytest.fixture(scope="module")
def anyio_backend() -> tuple[str, dict[str, bool]]:
    return "asyncio", {"use_uvloop": True}  # as the process has


class Recorded:
    """A recorder before a server."""

    def __init__(self, server: played.PlayedServer, config: RecordConfig) -> None:
        self.server, self.config, self.url = server, config, f"http://127.0.0.1:{config.port}"
        self.http = httpx.AsyncClient(trust_env=False, timeout=played.WAIT_S)

    async def rows(self, number: int) -> list[QueryRow]:
        """Wait until so many rows are written, and return them."""
        async with asyncio.timeout(played.WAIT_S):
            while (await self.status())["log"]["written"] < number:
                await asyncio.sleep(0.02)
        log = QueryLog(self.config.settings.querylog)
        try:
            return log.latest(number + 1)
        finally:
            log.close()

    async def status(self) -> dict[str, Any]:
        return await played.status_of(self.http, self.config.settings.home, self.url)

    async def post(self, body: Any, url: str = "", **headers: str) -> httpx.Response:
        """Ask with full consent, through the recorder or at another address."""
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        return await self.http.post((url or self.url) + path, json=body, headers=played.FULL | headers)

    def stream(self, body: Any, url: str = "", headers: Any = played.FULL) -> Any:
        return self.http.stream("POST", f"{url or self.url}/v1/chat/completions", json=body, headers=headers)

    async def require_same(self, body: Any) -> httpx.Response:
        """Ask the server and the recorder the same; what a client gets must be the same, and is returned."""
        direct, passed = [await self.post(body, url) for url in (self.server.url, self.url)]
        assert (passed.status_code, passed.content) == (direct.status_code, direct.content)
        assert passed.headers["x-server"] == "vllm"
        return passed


@asynccontextmanager
async def recording(
    play: played.Play, home: Path, token: str = "", tls: ssl.SSLContext | None = None, **changed: Any
) -> AsyncIterator[Recorded]:
    async with played.PlayedServer(play, tls) as server:
        made = Recorded(server, config(home, server.url, **changed))
        running = asyncio.create_task(record(made.config, token))
        try:
            async with asyncio.timeout(played.WAIT_S):
                while not running.done():
                    with suppress(OSError):
                        (await asyncio.open_connection("127.0.0.1", made.config.port))[1].close()
                        break
                    await asyncio.sleep(0.02)
            yield made
        finally:
            await made.http.aclose()
            running.cancel()
            with suppress(asyncio.CancelledError):
                await running


# Each stream that is learnt passes in test_frames.py, too.
PASSED = ["a chat", "a completion", "frames of 64 KiB", "ids that the client asked for", "usage that it asked for"]


@pytest.mark.parametrize("law", [law for law in played.LAWS if law in PASSED or law not in played.STREAMS])
async def test_with_and_without_the_recorder_a_client_gets_the_same_bytes(tmp_path: Path, law: str) -> None:
    body, steps, told, learnt = played.LAWS[law]
    async with recording(played.answering(steps, **told), tmp_path) as made:
        got = await made.require_same(body)
        assert got.content.count(b"data: ") > 3 or "stream" not in body
        first, second = made.server.requests
        assert "x-redraft-log" in first.headers and not any(name.startswith("x-redraft-") for name in second.headers)
        if not learnt:
            assert first.raw == second.raw
            assert sum((await made.status())["passed"].values()) == 1
            return
        assert second.body["return_token_ids"] is True
        [row] = await made.rows(1)
        assert (row.prompt_ids, row.completion_ids) == (played.PROMPT_IDS, [one for step in steps for one in step.ids])
        assert (row.finish_reason, row.domain, row.consent, row.target_version) == ("stop", "code", "full", 3)
        assert (row.drafted, row.accepted, row.drafted_ids, row.speculating) == ([3, 3], [2, 0], None, True)


async def test_without_consent_no_byte_is_changed_and_no_row_is_written(tmp_path: Path) -> None:
    spaced = json.dumps(played.CHAT | played.STREAM, indent=3).encode()
    refused = json.dumps(played.CHAT | {"store": False}).encode()
    async with recording(played.answering(played.STEPS), tmp_path) as made:
        metadata = {"X-Redraft-Log": "metadata"}
        for raw, consent in ((spaced, {}), (spaced, metadata), (refused, played.FULL), (b"{no", played.FULL)):
            said = {"Content-Type": "application/json", **consent}
            await made.http.post(f"{made.url}/v1/chat/completions?a=b%20c", content=raw, headers=said)
            assert made.server.requests[-1].raw == raw
        assert made.server.requests[-1].target == "/v1/chat/completions?a=b%20c"
        await made.http.post(f"{made.url}/v1/responses", json={**played.CHAT, "input": "x"}, headers=played.FULL)
        await made.http.get(f"{made.url}/v1/models")
        status = await made.status()
    assert status["passed"] == {"another path": 1, "a request that can't be read": 1, "no consent": 3}
    assert status["recorded"] == 0


async def test_the_policy_of_a_key_speaks_for_its_requests_and_hashes_name_who_asked(tmp_path: Path) -> None:
    key = add_key(tmp_path / "keys.json", "team", "client", "full")
    async with recording(played.answering(played.STEPS), tmp_path) as made:
        body = played.CHAT | {"user": "ann", "temperature": 0.25, "max_completion_tokens": 9}
        headers = {"Authorization": f"Bearer {key}", "X-Redraft-Group": "ticket-7"}
        await made.http.post(f"{made.url}/v1/chat/completions", json=body, headers=headers)
        [row] = await made.rows(1)
    assert made.server.requests[0].headers["authorization"] == headers["Authorization"]
    assert row.subject != row.key and row.key is not None and row.group is not None
    assert (row.sampling, row.draft_version) == ({"temperature": 0.25, "max_tokens": 9}, None)
    assert "ann" not in row.model_dump_json() and "ticket" not in row.model_dump_json()


async def test_a_client_holds_each_frame_before_the_one_after_the_next_is_written(tmp_path: Path) -> None:
    holds, num = asyncio.Condition(), 0

    async def play(request: played.Request) -> AsyncIterator[bytes]:
        yield played.head()
        for number, frame in enumerate(played.frames(request.body, played.STEPS, fingerprint="vllm")):
            async with holds:
                await holds.wait_for(lambda number=number: num >= number - 1)  # type: ignore[misc]
            yield played.chunk(frame)
        yield played.chunk(b"")

    async with (
        recording(play, tmp_path) as made,
        asyncio.timeout(played.WAIT_S),
        made.stream(played.CHAT | played.STREAM) as answer,
    ):
        async for part in answer.aiter_raw():
            async with holds:
                num += part.count(b"data: ")
                if b'"stop"' in part:
                    num += 1  # the usage, which is not the client's
                holds.notify_all()
    assert num == len(played.STEPS) + 3


@pytest.mark.parametrize("headers", [played.FULL, {}], ids=["recorded", "passed"])
async def test_a_client_that_leaves_is_told_to_the_server(tmp_path: Path, headers: dict[str, str]) -> None:
    async def play(request: played.Request) -> AsyncIterator[bytes]:
        yield played.head()
        for frame in played.frames(request.body, played.STEPS)[:3]:
            yield played.chunk(frame)
        await asyncio.Event().wait()

    async with recording(play, tmp_path) as made, asyncio.timeout(played.WAIT_S):
        async with made.stream(played.CHAT | played.STREAM, headers=headers) as answer:
            got = b""
            async for part in answer.aiter_raw():
                if (got := got + part).count(b"data: ") == 3:
                    break
        await made.server.left.wait()
        if headers:
            [row] = await made.rows(1)
            assert (row.finish_reason, row.completion_ids, row.speculating) == ("abort", [80, 81, 82], False)


@pytest.mark.parametrize("body", [played.CHAT, played.CHAT | played.STREAM], ids=["whole", "stream"])
async def test_an_answer_that_is_cut_is_cut_for_the_client_too(tmp_path: Path, body: dict[str, Any]) -> None:
    async def play(request: played.Request) -> AsyncIterator[bytes]:
        if "stream" not in body:
            yield played.head("application/json", length=99) + b'{"choices":'
        else:
            yield played.head() + b"".join(map(played.chunk, played.frames(request.body, played.STEPS)[:4]))
        yield b""

    async def got(made: Recorded, url: str) -> bytes:
        found = b""
        with pytest.raises(httpx.RemoteProtocolError):
            async with made.stream(body, url) as answer:
                async for part in answer.aiter_raw():
                    found += part
        return found

    async with recording(play, tmp_path) as made:
        assert await got(made, made.url) == await got(made, made.server.url)
        assert (await made.status())["passed"] == {"an answer that was cut": 1}


async def test_errors_are_the_servers_own(tmp_path: Path) -> None:
    async def play(request: played.Request) -> AsyncIterator[bytes]:
        if not request.body.get("stream"):
            yield played.json_answer(json.dumps({"error": str(sorted(request.body))}).encode(), "400 Bad Request")
            return
        first, *_ = played.frames(request.body, played.STEPS)
        yield played.head()
        for frame in (first, b": ping\n\n", b'data: {"error":{"message":"no memory"}}\n\n', b"data: [DONE]\n\n"):
            yield played.chunk(frame)
        yield played.chunk(b"")

    async with recording(play, tmp_path) as made:
        for body in (played.CHAT, played.CHAT | played.STREAM):
            await made.require_same(body)
        assert (await made.status())["passed"] == {"an error": 2}


async def test_a_server_that_refuses_what_is_added_is_asked_as_the_client_asked(tmp_path: Path) -> None:
    async def play(request: played.Request) -> AsyncIterator[bytes]:
        refused = "return_token_ids" in request.body
        yield (
            played.json_answer(b"{}", "400 Bad Request")
            if refused
            else played.json_answer(played.whole(request.body, played.STEPS))
        )

    async with recording(play, tmp_path) as made:
        assert [(await made.post(played.CHAT)).status_code for _ in range(2)] == [200, 200]
        assert len(made.server.requests) == 3
        assert (await made.status())["passed"]["a server that refuses return_token_ids"] == 2


async def test_connections_are_kept_and_a_server_that_is_away_is_told(tmp_path: Path) -> None:
    async with recording(played.answering(played.STEPS), tmp_path) as made:
        for _ in range(5):
            await made.post(played.CHAT | played.STREAM)
        assert made.server.connections == 1
    async with recording(played.answering(played.STEPS), tmp_path, server=f"http://127.0.0.1:{free_port()}") as made:
        answer = await made.post(played.TEXT)
        assert (answer.status_code, answer.json()["error"]["code"]) == (502, "bad_gateway")


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    """A certificate of this machine's address; its key lies next to it."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl makes it")
    file = tmp_path / "ca.pem"
    named = ["-subj", "/CN=server", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(tmp_path / "key.pem")]
    argv = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", *named, "-out", str(file)]
    subprocess.run(argv, check=True, capture_output=True)
    return file


async def test_a_server_with_tls_is_known_by_the_certificates_that_are_named(tmp_path: Path, certificate: Path) -> None:
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificate, tmp_path / "key.pem")
    for ca, status in ((str(certificate), 200), ("", 502)):
        async with recording(played.answering(played.STEPS), tmp_path, tls=tls, ca=ca) as made:
            assert (await made.post(played.TEXT)).status_code == status


async def test_with_a_log_that_takes_no_rows_requests_pass_and_rows_are_counted(tmp_path: Path) -> None:
    (tmp_path / "queries.db").write_bytes(b"torn" * 4096)
    with pytest.raises(DatabaseTorn):
        QueryLog(tmp_path / "queries.db").last_seq()
    async with recording(played.answering(played.STEPS), tmp_path) as made, asyncio.timeout(played.WAIT_S):
        for _ in range(3):
            assert (await made.post(played.CHAT | played.STREAM)).content.endswith(b"[DONE]\n\n")
        while (await made.status())["log"]["dropped"] < 3:
            await asyncio.sleep(0.02)
        assert (await made.status())["log"]["written"] == 0


async def test_ids_that_the_target_does_not_have_are_no_row(tmp_path: Path) -> None:
    async with recording(played.answering([played.Step([80, 99_999], {"content": "a"}, "stop")]), tmp_path) as made:
        await made.post(played.CHAT | played.STREAM)
        assert (await made.status())["passed"] == {"ids of another target": 1}


@pytest.mark.parametrize("body", [played.TEXT, played.TEXT | played.STREAM], ids=["whole", "stream"])
async def test_a_row_names_the_server_and_the_draft_that_the_answer_names(tmp_path: Path, body: dict[str, Any]) -> None:
    """One router before two servers, of which the second does not know what drafted, and one that says nothing."""
    said = [["one:8000", "7"], ["two:8000", ""], None]

    async def play(request: played.Request) -> AsyncIterator[bytes]:
        known = request.headers.get(ASKED.decode()) == proof("token").decode()
        told = json.dumps(said[len(made.server.requests) % 3 - 1]).encode() if known else b"null"
        named = b"" if told == b"null" else b"\r\n" + TOLD + b": " + told
        if request.body.get("stream"):
            *sent, done = played.frames(request.body, played.STEPS)
            yield played.head()
            for frame in (*sent, *([COMMENT + told + b"\n\n"] if named else []), done):
                yield played.chunk(frame)
            yield played.chunk(b"")
        else:
            first, _, rest = played.json_answer(played.whole(request.body, played.STEPS)).partition(b"\r\n\r\n")
            yield first + named + b"\r\n\r\n" + rest

    async with recording(play, tmp_path, token="token") as made:
        passed = [await made.post(body) for _ in said]
        direct = await made.post(body, made.server.url)
        assert [(one.content, one.headers) for one in passed] == [(direct.content, direct.headers)] * 3
        rows = await made.rows(3)
        assert [(row.server, row.draft_version) for row in rows] == [("one:8000", 7), ("two:8000", None), (None, None)]
        assert (await made.status())["unnamed"] == 2
        await made.http.post(f"{made.url}/v1/completions", json=body)
        assert ASKED.decode() not in made.server.requests[-1].headers


def test_the_process_has_none_of_the_heavy_libraries_even_when_it_scrubs(tmp_path: Path) -> None:
    byte_tokenizer().save_pretrained(tmp_path)
    ids = byte_tokenizer().encode("<|im_start|>write to ann@example.org<|im_end|>")
    code = (
        "import sys, json, pathlib, services.record; from infra import scrub; from models.markers import Markers;"
        f"print(json.dumps(Markers.read(pathlib.Path({str(tmp_path)!r})).rewrite({ids}, scrub.scrub)));"
        "heavy = {'torch', 'ray', 'mlflow', 'vllm', 'transformers', 'prefect'};"
        "assert not (found := heavy & sys.modules.keys()), found"
    )
    told = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    assert tuple(json.loads(told)) == ChatEncoder.of(byte_tokenizer()).rewrite(ids, scrub.scrub)
    assert json.loads(told)[1] == "<|im_start|>write to [EMAIL]<|im_end|>"
    with pytest.raises(ValueError, match="has no tokenizer.json"):
        Markers.read(tmp_path / "absent")


async def test_a_name_that_the_server_does_not_know_is_refused_at_the_start(tmp_path: Path) -> None:
    async def play(request: played.Request) -> AsyncIterator[bytes]:
        yield played.json_answer(json.dumps({"data": [{"id": "target"}, {"id": "lora"}]}).encode())

    async with played.PlayedServer(play) as server:
        made = config(tmp_path, server.url, models=["target", "lara"]).model_dump(mode="json")
        with pytest.raises(ValueError, match=f'--model is "lara", but {server.url} has target, lora'):
            await asyncio.to_thread(record_program, made, Settings(home=tmp_path))


@pytest.mark.slow
def test_a_recorder_is_supervised_as_one_of_the_programs_and_started_again(tmp_path: Path) -> None:
    told = config(tmp_path, f"http://127.0.0.1:{free_port()}").model_dump(mode="json", exclude={"host", "settings"})
    code = (
        "import json, sys; from infra.service_process import record_program; from infra.settings import Settings;"
        f"from infra.supervisor import Supervisor; settings = Settings(home={str(tmp_path)!r});"
        "Supervisor([record_program(json.loads(sys.argv[1]), settings)], settings.home, '').run()"
    )

    def found() -> ProcessRecord | None:
        return state.programs[0] if (state := read_state(tmp_path)) is not None else None

    def is_up(restarts: int) -> bool:
        now = found()
        return now is not None and now.ready and now.restarts == restarts

    argv = [sys.executable, "-c", code, json.dumps(told)]
    with Child.start(argv, {"PYTHONPATH": str(ROOT)}, tmp_path / "keeper.log", "what keeps the recorder") as keeper:
        wait_until(lambda: is_up(0), played.WAIT_S, keeper, "the recorder")
        first = found()
        assert first is not None and first.pid is not None
        assert (first.url, answers(first.url + RECORDER_HEALTH)) == (f"http://127.0.0.1:{told['port']}", True)
        assert httpx.get(first.url + STATUS_PATH, trust_env=False).status_code == 401
        os.kill(first.pid, signal.SIGKILL)
        wait_until(lambda: is_up(1), played.WAIT_S, keeper, "the recorder again")


def test_what_is_wrong_is_said_in_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = config(tmp_path, "http://127.0.0.1:1")
    for changed, said in (({"models": []}, "models"), ({"ca": "absent.pem"}, "absent.pem"), ({"port": 0}, "port")):
        (file := tmp_path / "record.json").write_text(json.dumps(made.model_dump(mode="json") | changed))
        assert main(["--config", str(file)]) == 2
        assert said in capsys.readouterr().err


def test_only_the_ids_that_were_asked_for_are_taken_out() -> None:
    answer = b'{"draft_token_ids":[1],"prompt_token_ids": [2, 3],"token_ids":[4],"text":"\\"token_ids\\":[5]"}'
    left = b'{"draft_token_ids":[1],"prompt_token_ids": null,"token_ids":null,"text":"\\"token_ids\\":[5]"}'
    assert without_ids(answer) == left
