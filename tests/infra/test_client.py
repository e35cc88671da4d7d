"""The client against a real server of a few lines that answers, refuses and breaks off."""

import asyncio
import json
from collections.abc import Iterator, Sequence
from http.server import ThreadingHTTPServer
from typing import Any

import httpx
import pytest

from infra.client import Answer, Chat, Client
from infra.status import ServiceStatus
from tests.infra.collector import QuietHandler, running
from tests.infra.statuses import PROOF, STATUS

SERVING = STATUS.model_copy(update={"draft_version": 7, "proof": PROOF, "refused": {}, "postponed": {}})
STEPS = {"drafted_per_step": [3, 3, 3], "accepted_per_step": [3, 0, 1], "steps": 3, "accepted": 4, "looked_up": 1}
OURS = {"redraft": {"draft_version": 7, **STEPS}}
OF_VLLM = {"metrics": {"speculative_decoding": {"per_step_drafted": [3, 3], "per_step_accepted": [2, 0]}}}


class Handler(QuietHandler):
    """Answers chats by what the last message says, and tells the status that it was given."""

    def do_GET(self) -> None:
        body = self.server.status.model_dump_json() if self.path == "/redraft/status" else "redraft_swaps 1\n"
        self._begin(200 if self.headers["Authorization"] == "Bearer the-key" else 401)
        self.wfile.write(body.encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/redraft/speculation":
            self.server.status = self.server.status.model_copy(update={"speculating": body["on"]})
            self._begin(200)
            return
        said = body["messages"][-1]["content"]
        self.server.asked.append((self.headers, {**body, "said": said}))
        if said == "refuse":
            self._begin(503)
            return
        self._begin(200, "text/event-stream")
        self._frame(choices=[{"index": 0, "delta": {"content": "hel"}, "finish_reason": None, "token_ids": [5]}])
        if said == "fail":
            self.wfile.write(b'data: {"error": {"message": "engine died", "type": "server_error"}}\n\n')
        elif said != "break":
            self._frame(choices=[{"index": 0, "delta": {"content": "lo"}, "finish_reason": "stop", "token_ids": [6]}])
            usage = {"prompt_tokens": 1, "completion_tokens": 8, "total_tokens": 9}
            self._frame(choices=[], **(OF_VLLM | {"usage": usage} if said == "vLLM" else {"usage": usage | OURS}))
            self.wfile.write(b"data: [DONE]\n\n")

    def _begin(self, status: int, kind: str = "application/json") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.end_headers()

    def _frame(self, **content: object) -> None:
        chunk = {"id": "1", "object": "chat.completion.chunk", "created": 0, "model": "target", **content}
        self.wfile.write(f"data: {json.dumps(chunk)}\n\n".encode())


@pytest.fixture
def server() -> Iterator[ThreadingHTTPServer]:
    with running(ThreadingHTTPServer(("127.0.0.1", 0), Handler)) as server:
        server.asked, server.status = [], SERVING
        yield server


def url_of(server: ThreadingHTTPServer) -> str:
    return f"http://127.0.0.1:{server.server_port}"


def chats(*texts: str) -> list[Chat]:
    return [Chat(f"id of {text}", "code", [{"role": "user", "content": text}]) for text in texts]


def send(client: Client, asked: Sequence[Chat], concurrency: int = 1, primers: Sequence[Chat] = ()) -> list[Answer]:
    return asyncio.run(client.send(asked, concurrency=concurrency, max_tokens=8, primers=primers))


def ask(server: ThreadingHTTPServer, *texts: str) -> list[Answer]:
    return send(Client(url_of(server)), chats(*texts), concurrency=2)


def seen(server: ThreadingHTTPServer, *names: str) -> list[tuple[Any, ...]]:
    """Return these headers and fields of what was asked."""
    return [tuple(body.get(name, headers[name]) for name in names) for headers, body in server.asked]


def test_an_answer_carries_what_speculation_did(server):
    (answer,) = ask(server, "hello")
    assert (answer.status, answer.text, answer.finish_reason, answer.num_tokens) == ("ok", "hello", "stop", 8)
    assert answer.draft_version == "7"
    assert (answer.num_steps, answer.num_accepted, answer.num_looked_up) == (3, 4, 1)
    assert (answer.drafted_per_step, answer.accepted_per_step) == ((3, 3, 3), (3, 0, 1))
    assert answer.token_ids == (5, 6)
    assert len(answer.arrival_ms) == 2
    assert answer.first_token_ms == answer.arrival_ms[0] <= answer.arrival_ms[1] <= 1000 * answer.seconds


def test_domain_consent_and_what_belongs_to_a_chat_go_with_it_and_who_operates_asks_for_counts(server):
    (chat,), tools = chats("hello"), [{"type": "function", "function": {"name": "f"}}]
    send(Client(url_of(server), "the-key", operates=False), [chat])
    send(Client(url_of(server), "the-key", operates=True), [chat._replace(fields={"tools": tools}, group="g")])
    assert seen(server, "X-Redraft-Domain", "X-Redraft-Log", "temperature") == [("code", "full", 0.0)] * 2
    assert seen(server, "tools", "X-Redraft-Group", "X-Redraft-Detail") == [(None,) * 3, (tools, "g", "steps")]


def test_what_vllms_own_endpoint_tells_of_its_steps_is_read_too(server):
    (answer,) = ask(server, "vLLM")
    assert (answer.drafted_per_step, answer.accepted_per_step, answer.draft_version) == ((3, 3), (2, 0), None)


def test_clients_ask_in_turn_until_they_are_stopped(server):
    answers: list[Answer] = []
    how = {"concurrency": 2, "max_tokens": 8, "stop": lambda: len(answers) >= 5, "on_answer": answers.append}
    asyncio.run(Client(url_of(server)).keep_asking(chats("a", "b"), **how))
    assert 5 <= len(answers) <= 6  # what ran when they were stopped is waited for
    assert {answer.prompt_id for answer in answers} == {"id of a", "id of b"}
    assert all(answer.status == "ok" for answer in answers)
    assert seen(server, "X-Redraft-Log", "temperature")[0] == ("none", 0.0)


def test_chats_begin_one_after_the_other_behind_primers_of_growing_length(server):
    answers = send(Client(url_of(server)), chats("a", "b"), concurrency=3, primers=chats("one", "two"))
    assert [answer.prompt_id for answer in answers] == ["id of a", "id of b"]
    limits = seen(server, "said", "max_tokens")
    assert sorted(limits[:3]) == [("one", 3), ("one", 8), ("two", 6)]
    assert sorted(limits[3:]) == [("a", 8), ("b", 8)]


def test_a_primer_that_fails_is_told(server):
    with pytest.raises(RuntimeError, match=r"2 of 4 primers failed, the first with http 503"):
        send(Client(url_of(server)), chats("a"), concurrency=4, primers=chats("refuse", "one"))


def test_every_way_to_fail_has_its_name(server):
    answers = ask(server, "hello", "refuse", "break", "fail")
    assert [answer.status for answer in answers] == ["ok", "http 503", "truncated", "error frame: engine died"]


@pytest.mark.slow
def test_a_service_that_is_not_there_fails_each_request(server):
    server.shutdown()
    server.server_close()
    (answer,) = ask(server, "a")
    assert answer.status == "APIConnectionError"


def test_the_service_is_asked_with_the_key_and_speculation_is_switched(server):
    with Client(url_of(server), "the-key") as client:
        assert client.status().model_dump(exclude={"url"}) == SERVING.model_dump()
        assert client.metrics() == "redraft_swaps 1\n"
        client.speculate(False)
        assert client.status().speculating is False
    with Client(url_of(server)) as client, pytest.raises(httpx.HTTPStatusError, match="401"):
        client.status()


def test_a_refused_draft_is_not_waited_for_and_one_refused_before_does_not_matter(server):
    with Client(url_of(server), "the-key") as client:
        server.status = SERVING.model_copy(update={"refused": {"3-0123456789ab": "another output"}})
        client.wait_for_draft(7, ServiceStatus.has_proven)
        with pytest.raises(RuntimeError, match="drafts with 7, not with 3: .*another output"):
            client.wait_for_draft(3, ServiceStatus.has_proven)
        with pytest.raises(RuntimeError, match="drafts with 7, not with 8"):
            client.wait_for_draft(8, ServiceStatus.drafts_with, timeout_s=0.0)
