"""The traffic sender against a real server of a few lines that answers, refuses and breaks off."""

import asyncio
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from flows.traffic import Answer, keep_asking, send, summarise
from models.sources import Message, Prompt


class Handler(BaseHTTPRequestHandler):
    """Answers by what the last message says."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        said = body["messages"][-1]["content"]
        self.server.seen.append((self.headers["X-Redraft-Domain"], self.headers["X-Redraft-Log"], body["temperature"]))
        if said == "refuse":
            self.send_response(503)
            self.end_headers()
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        self._frame(choices=[{"index": 0, "delta": {"content": "hel"}, "finish_reason": None, "token_ids": [5]}])
        if said == "fail":
            self.wfile.write(b'data: {"error": {"message": "engine died", "type": "server_error"}}\n\n')
        elif said != "break":
            self._frame(choices=[{"index": 0, "delta": {"content": "lo"}, "finish_reason": "stop", "token_ids": [6]}])
            speculation = {"draft_version": 7, "drafted_per_step": [3, 3, 3], "accepted_per_step": [3, 0, 1]}
            usage = {"prompt_tokens": 1, "completion_tokens": 8, "total_tokens": 9, "redraft": speculation}
            self._frame(choices=[], usage=usage)
            self.wfile.write(b"data: [DONE]\n\n")

    def _frame(self, **content: object) -> None:
        chunk = {"id": "1", "object": "chat.completion.chunk", "created": 0, "model": "target", **content}
        self.wfile.write(f"data: {json.dumps(chunk)}\n\n".encode())

    def log_message(self, *_: object) -> None:
        """Stay silent."""


@pytest.fixture
def server() -> Iterator[ThreadingHTTPServer]:
    """Return a server that runs."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.seen = []
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def ask(server: ThreadingHTTPServer, *texts: str) -> list[Answer]:
    prompts = [Prompt(messages=(Message(role="user", content=text),), domain="code", group="g") for text in texts]
    url = f"http://127.0.0.1:{server.server_port}"
    return asyncio.run(send(prompts, url, concurrency=2, max_tokens=8))


def test_an_answer_carries_what_speculation_did(server):
    (answer,) = ask(server, "hello")
    assert (answer.status, answer.text, answer.finish_reason, answer.num_tokens) == ("ok", "hello", "stop", 8)
    assert answer.draft_version == "7"
    assert (answer.drafted_per_step, answer.accepted_per_step) == ((3, 3, 3), (3, 0, 1))
    assert answer.token_ids == (5, 6)
    assert len(answer.arrival_ms) == 2
    assert answer.first_token_ms == answer.arrival_ms[0] <= answer.arrival_ms[1] <= 1000 * answer.seconds


def test_clients_ask_in_turn_until_they_are_stopped(server):
    prompts = [Prompt(messages=(Message(role="user", content=text),), domain="code", group="g") for text in ("a", "b")]
    answers: list[Answer] = []
    asyncio.run(
        keep_asking(
            prompts,
            f"http://127.0.0.1:{server.server_port}",
            concurrency=2,
            max_tokens=8,
            stop=lambda: len(answers) >= 5,
            on_answer=answers.append,
        )
    )
    assert 5 <= len(answers) <= 6  # what ran when they were stopped is waited for
    assert {answer.prompt_id for answer in answers} == {prompt.id for prompt in prompts}
    assert all(answer.status == "ok" for answer in answers)
    assert server.seen[0][1:] == ("none", 0.0)


def test_domain_and_consent_go_with_each_request(server):
    ask(server, "a", "b")
    assert server.seen == [("code", "full", 0.0)] * 2


def test_every_way_to_fail_is_counted_by_its_name(server):
    answers = ask(server, "hello", "refuse", "break", "fail")
    assert [answer.status for answer in answers] == ["ok", "http 503", "truncated", "error frame: engine died"]
    report = summarise(answers, seconds=2.0)
    assert (report.num_requests, report.num_ok, report.tau, report.tokens_per_s) == (4, 1, pytest.approx(7 / 3), 4.0)
    assert report.failures == {"http 503": 1, "truncated": 1, "error frame: engine died": 1}
    assert report.draft_versions == {"7": 1}


def test_a_service_that_is_not_there_fails_each_request(server):
    port = server.server_port
    server.shutdown()
    server.server_close()
    prompts = [Prompt(messages=(Message(role="user", content="a"),), domain="code", group="g")]
    (answer,) = asyncio.run(send(prompts, f"http://127.0.0.1:{port}", concurrency=1, max_tokens=8))
    assert answer.status == "APIConnectionError"
    assert summarise([answer], 1.0).tau is None
