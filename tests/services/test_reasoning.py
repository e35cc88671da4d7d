"""Chats that two models answer in turn, over two engines without a service around them; test_service.py asks one."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.testclient import TestClient
from transformers import AutoTokenizer

from models.engines.torch import Params as EngineParams
from models.engines.torch import TorchEngine
from models.engines.vllm.tap import EngineEnded
from models.serving import Reasoning as Settings
from services.access import UNAVAILABLE, RequestError
from services.app import from_error, routes
from services.http_server import opened
from services.reasoning import DONE, HEADER, Reasoning
from tests.models.reasoning.thinking import make_small

pytestmark = pytest.mark.engine

Answer = Callable[..., Any]
MODEL, REQUEST = "target", "1" * 32
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "What is 2 times 3?"}], "max_tokens": 24, "seed": 1}
UNSUPPORTED = [("max_tokens", 0), ("temperature", -1), ("temperature", 3), ("n", 2), ("tools", []), ("logprobs", True)]
LONG = [{"role": "user", "content": "x" * 600}]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_small(tmp_path_factory.mktemp("small"))


@asynccontextmanager
async def running(target_dir: Path, small: Path, **changes: Any) -> AsyncIterator[tuple[Reasoning, TorchEngine]]:
    """Run both engines."""
    params = EngineParams(dtype="float32", max_model_len=512)
    target = await TorchEngine.start(target_dir, None, params)
    engine = {"name": "torch", "dtype": "float32", "max_model_len": 512}
    settings = Settings(**{"model": str(small), "engine": engine, **changes})
    tokenizer = AutoTokenizer.from_pretrained(target_dir)
    reasoning = await Reasoning.start(target, target_dir, 512, MODEL, tokenizer, settings)
    yield reasoning, target
    await reasoning.close()


@pytest.fixture(scope="module")
def answer(tiny_target: Path, small: Path) -> Iterator[Answer]:
    """What asks both engines, and returns an answer, of a stream its events."""

    async def ask(reasoning: Reasoning, method: str = "spec_reason", **asked: Any) -> Any:
        got = await reasoning.answer(method, CHAT | asked, REQUEST, 0)
        return got if isinstance(got, dict) else [event async for event in got]

    with asyncio.Runner() as runner:
        engines = running(tiny_target, small)
        reasoning, _ = runner.run(engines.__aenter__())
        yield lambda **asked: runner.run(ask(reasoning, **asked))
        runner.run(engines.__aexit__(None, None, None))


@pytest.mark.parametrize("method", ["spec_reason", "speculative_thinking"])
def test_an_answer_says_who_wrote_how_much_and_a_stream_tells_the_same(method: str, answer: Answer) -> None:
    got = answer(method=method)
    [choice], usage = got["choices"], got["usage"]
    assert (got["object"], got["id"], got["model"]) == ("chat.completion", f"chatcmpl-{REQUEST}", MODEL)
    assert (choice["message"]["role"], choice["finish_reason"]) == ("assistant", "length")
    assert usage["completion_tokens"] == 24
    told = usage["redraft"]
    assert (told["lossless"], told["reasoning"]) == (False, method)
    if method == "spec_reason":  # a target of noise likes no step
        assert (told["steps_by_small"], told["tokens_by_small"]) == (0, 0)
        assert told["tokens_given_up"] >= told["steps"] > 0
    else:
        assert told["tokens_by_small"] > 0
    events = answer(method=method, stream=True, stream_options={"include_usage": True})
    assert events[-1] == DONE
    chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-1]]
    streamed = [one for chunk in chunks for one in chunk["choices"]]
    assert streamed[0]["delta"]["role"] == "assistant"
    assert "".join(one["delta"].get("content", "") for one in streamed) == choice["message"]["content"]
    reasons = [one["finish_reason"] for one in streamed]
    assert (reasons[-1], {*reasons[:-1]}) == ("length", {None})
    assert (chunks[-1]["choices"], chunks[-1]["usage"]) == ([], usage)


@pytest.mark.parametrize(
    ("asked", "status", "code"),
    [
        ({"method": "tree_of_thought"}, 400, None),
        ({"model": "another"}, 404, "model_not_found"),
        *(
            ({"messages": messages}, 400, "unsupported")
            for messages in ([], [{"role": "tool", "content": "x"}], [{"role": "user", "content": [{"type": "text"}]}])
        ),
        *(({name: value}, 400, "unsupported") for name, value in UNSUPPORTED),
        ({"messages": LONG}, 400, "context_length_exceeded"),
        ({"max_tokens": 500}, 400, "context_length_exceeded"),
    ],
    ids=str,
)
def test_what_is_not_served_so_is_refused(asked: dict[str, Any], status: int, code: str | None, answer: Answer) -> None:
    with pytest.raises(RequestError) as refused:
        answer(**asked)
    assert (refused.value.status, refused.value.code) == (status, code)


def test_only_what_the_recipe_offers_can_be_asked_for(tiny_target: Path, small: Path) -> None:
    async def inside() -> None:
        async with running(tiny_target, small, methods=[{"name": "spec_reason"}]) as (reasoning, _):
            await reasoning.answer("speculative_thinking", CHAT, REQUEST, 0)

    with pytest.raises(RequestError, match="there are: spec_reason"):
        asyncio.run(inside())


def test_where_the_recipe_names_no_small_model_it_is_refused_by_the_name_of_the_table() -> None:
    client = TestClient(routes(SimpleNamespace(reasoning=None)))  # type: ignore[arg-type] # nobody else is asked
    told = client.post("/v1/chat/completions", json=CHAT, headers={HEADER: "spec_reason"})
    assert told.status_code == 400
    assert "[serve.reasoning]" in told.json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_an_ended_engine_is_503(tiny_target: Path, small: Path, stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    async def inside() -> None:
        async with running(tiny_target, small) as (reasoning, target):

            async def ended(*_: Any) -> None:
                raise EngineEnded

            monkeypatch.setattr(target, "generate", ended)
            got = await reasoning.answer("spec_reason", CHAT | {"stream": stream}, REQUEST, 0)
            assert not isinstance(got, dict)
            await opened(got, from_error, lambda: None, lambda: None)

    with pytest.raises(RequestError) as refused:
        asyncio.run(inside())
    assert (refused.value.status, refused.value.message) == (503, UNAVAILABLE.message)


def test_a_small_model_that_can_not_go_with_the_target_is_refused(
    tiny_target: Path, small: Path, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=r"is no directory"):
        Settings(model=str(tmp_path / "nowhere"))
    with pytest.raises(ValueError, match="no method"):
        Settings(model=str(small), engine={"name": "paper"})
    other = make_small(tmp_path / "other")
    file = other / "tokenizer.json"
    file.write_text(file.read_text() + "\n")
    with pytest.raises(ValueError, match=r"\[serve.reasoning\] model .* has another tokenizer than the target"):
        asyncio.run(running(tiny_target, other).__aenter__())
