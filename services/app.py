"""The routes over one service.

Bodies are parsed here and not by FastAPI, which takes NaN, answers errors in a shape of its own and reads a body before
anyone looked at the key.
"""

import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from datetime import UTC, datetime
from functools import partial
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from fastapi.routing import APIRoute
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp

from infra.views.dashboard import dashboard
from models.engines.vllm.openai import VERSION, Answer, EngineStopped, Refused
from models.engines.vllm.tap import EngineEnded
from services import metrics
from services.access import CLIENTS, INTERNAL_ERROR, MESSAGES, PAGE_PATH, ROLES_OF, UNAVAILABLE, RequestError
from services.failures import place_of
from services.fair_queue import QueuedRequest
from services.http_server import bounded, opened
from services.questions import RESPONSES, Origin, as_chat, check_limits, describe_origin, parse_body, wants_steps
from services.reasoning import HEADER
from services.service import Service

NOT_IMPLEMENTED = 501
# What reading a tool's odd parameters or an odd item fails with; anything else is a failure of ours.
ODD = (LookupError, AttributeError, RecursionError)

Handler = Callable[[dict[str, Any], Request], Awaitable[Answer]]

log = logging.getLogger(__name__)


def build_app(service: Service) -> ASGIApp:
    """Return the ASGI app over a running service; closing the app closes the service."""
    return service.admission.around(bounded(routes(service), service.config.serve.limits))


def routes(service: Service) -> FastAPI:
    """Return the routes; their docstrings are what the reference of the API says of them."""

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await service.close()

    app = FastAPI(title="redraft", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    for kind in (HTTPException, RequestError, Exception):  # the last one Starlette raises again, and Admission logs it
        app.add_exception_handler(kind, _on_error)

    @app.get("/health")
    async def health() -> JSONResponse:
        """`{"status": "ok"}`, "degraded" if a background task failed, 503 if the target can't serve. Needs no key."""
        await _require_health(service)
        return JSONResponse({"status": "degraded" if service.background.failed else "ok"})

    @app.get("/readyz")
    async def readyz() -> JSONResponse:
        """`{"status": "ready"}`, 503 if `/health` is, at the end, and while the first draft is tested. Needs no key."""
        await _require_health(service)
        if (reason := service.unready()) is not None:
            raise RequestError(503, f"not ready: {reason}", code="not_ready")
        return JSONResponse({"status": "ready"})

    @app.get("/metrics")
    async def show_metrics() -> Response:
        """Prometheus' text format, see [metrics](metrics.md). Needs a scraper's or an operator's key."""
        return Response(metrics.render(service.status()), media_type=CONTENT_TYPE_LATEST)

    @app.get("/redraft/status")
    async def status() -> JSONResponse:
        """What serves and why: acceptance by domain, counts of requests, swaps, log rows. Needs an operator's key."""
        return JSONResponse(service.status().model_dump(mode="json"))

    @app.get(PAGE_PATH)
    async def show_dashboard() -> Response:
        """The same as a page for a browser, which loads itself again. Needs an operator's key, as password."""
        page = dashboard(service.status(), datetime.now(UTC))
        return HTMLResponse(page, headers={"Cache-Control": "no-store", "X-Frame-Options": "DENY"})

    @app.post("/redraft/speculation")
    async def speculation(raw: Request) -> JSONResponse:
        """Takes `{"on": true}` or `{"on": false}`; answers `{"speculating": …}`, false if there is no good draft.

        Needs an operator's key.
        """
        body = await _body(raw)
        if body.keys() != {"on"} or not isinstance(body["on"], bool):
            raise RequestError(400, 'wanted {"on": true} or {"on": false}', "on")
        return JSONResponse({"speculating": await service.set_speculation(body["on"])})

    @app.get("/v1/models")
    async def models() -> JSONResponse:
        """OpenAI's list of models: the target, by its served name."""
        return JSONResponse(await service.handlers.models())

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> JSONResponse:
        """One of them."""
        served = {one["id"]: one for one in (await service.handlers.models())["data"]}
        if name not in served:
            message = f"there is no such model; there is: {', '.join(served)}"
            raise RequestError(404, message, "model", "model_not_found")
        return JSONResponse(served[name])

    @app.post("/v1/chat/completions")
    async def chat(raw: Request) -> Response:
        """OpenAI's chat completions, whole or streamed; `usage.redraft` says what speculation did."""
        if HEADER in raw.headers:
            return await _reason(service, raw)
        return await _generate(service, service.handlers.chat, raw)

    @app.post("/v1/completions")
    async def complete(raw: Request) -> Response:
        """OpenAI's completions of raw prompts: special tokens in them are special, unlike in chats; else as above."""
        return await _generate(service, service.handlers.complete, raw)

    @app.post(RESPONSES)
    async def respond(raw: Request) -> Response:
        """OpenAI's responses, as chats. None is stored: what needs a stored one is refused."""
        return await _generate(service, service.handlers.respond, raw)

    @app.post(MESSAGES)
    async def message(raw: Request) -> Response:
        """Anthropic's messages, as chats; also with the key in `X-Api-Key`, and with errors in Anthropic's shape."""
        return await _generate(service, service.handlers.message, raw)

    @app.post(f"{MESSAGES}/count_tokens")
    async def count_tokens(raw: Request) -> Response:
        """How many tokens a request to `/v1/messages` has, `{"input_tokens": …}`."""
        return await _count(service, service.handlers.count_tokens, raw)

    @app.post("/tokenize")
    async def tokenize(raw: Request) -> Response:
        """vLLM's: the token ids of a chat's `messages`, or of a `prompt`, as they would be answered."""
        return await _count(service, service.handlers.tokenize, raw)

    @app.post("/detokenize")
    async def detokenize(raw: Request) -> Response:
        """vLLM's: the text of `tokens`, special ones too, as `{"prompt": …}`."""
        return await _count(service, service.handlers.detokenize, raw)

    @app.get("/version")
    async def version() -> JSONResponse:
        """vLLM's, `{"version": …}`."""
        return JSONResponse({"version": VERSION})

    return app


async def _require_health(service: Service) -> None:
    try:
        await service.engine.health()
    except RuntimeError:
        raise RequestError(503, "the target can't serve", code="unhealthy") from None


async def _body(raw: Request) -> dict[str, Any]:
    return parse_body(raw.headers.get("content-type", ""), await raw.body())


async def _generate(service: Service, handler: Handler, raw: Request) -> Response:
    """Check a request, wait for its turn, let vLLM's handler answer, and have the recorder expect what comes of it."""
    path = raw.scope["path"]
    if HEADER in raw.headers:
        raise RequestError(400, f"{HEADER} is for /v1/chat/completions", HEADER, "unsupported")
    body = await _body(raw)
    said = _limited(path, body)
    recorder, request_id = service.recorder, raw.scope["redraft.id"]
    usage = partial(recorder.usage, request_id, wants_steps(raw.headers, raw.scope["redraft.caller"]))
    origin, turn = await _turn(service, raw, said)
    recorder.expect(origin._replace(domain=service.domains.admit(origin.key, origin.domain)))
    try:
        answer = await answered(handler(body | {"priority": turn.priority}, raw), body)
    except BaseException:
        recorder.forget(request_id)
        raise
    if isinstance(answer, dict):
        if (told := usage()) is not None:
            answer["usage"]["redraft"] = told
        recorder.forget(request_id)
        return JSONResponse(answer)
    return _stream(await opened(answer, from_error, usage, partial(recorder.forget, request_id), path))


async def _count(service: Service, handler: Handler, raw: Request) -> Response:
    """Answer how a prompt is encoded or decoded, in turn with what generates: that takes one thread, whoever asks."""
    body = await _body(raw)
    await _turn(service, raw, {**_limited(raw.scope["path"], body), "max_tokens": 1})
    return JSONResponse(await answered(handler(body, raw), body))


def _limited(path: str, body: dict[str, Any]) -> Mapping[str, Any]:
    check_limits(said := as_chat(path, body))
    return said


async def _turn(service: Service, raw: Request, said: Mapping[str, Any]) -> tuple[Origin, QueuedRequest]:
    """Say what is known of a request, by `as_chat`, and wait until it may run."""
    origin = describe_origin(raw.scope["redraft.id"], raw.headers, said, raw.scope["redraft.caller"], service.secret)
    turn = await service.turns.take(origin.key, service.turns.cost(origin.key, said, len(await raw.body())))
    raw.scope["redraft.at_end"].append(turn.end)
    return origin, turn


def _stream(frames: AsyncIterator[str]) -> StreamingResponse:
    return StreamingResponse(frames, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})


async def _reason(service: Service, raw: Request) -> Response:
    """Answer by a small model and the target in turn; the recorder never hears of it."""
    if service.reasoning is None:
        message = "no small model is served beside the target: the recipe has to name one in [serve.reasoning]"
        raise RequestError(400, message, HEADER, "unsupported")
    body = await _body(raw)
    check_limits(body)
    _, turn = await _turn(service, raw, body)
    answer = await service.reasoning.answer(raw.headers[HEADER], body, raw.scope["redraft.id"], turn.priority)
    if isinstance(answer, dict):
        return JSONResponse(answer)
    return _stream(await opened(answer, from_error, lambda: None, lambda: None))


async def _on_error(raw: Request, error: Exception) -> Response:
    path = raw.scope["path"]
    if isinstance(error, HTTPException):
        told = {404: f"there is no such path; there are {_served(raw)}", 405: "this path takes another method"}
        error = RequestError(error.status_code, told.get(error.status_code, "bad request"))
    return (error if isinstance(error, RequestError) else INTERNAL_ERROR).response(path)


def _served(raw: Request) -> str:
    """Return the paths that are there for clients."""
    starts = tuple(start for start, roles in ROLES_OF.items() if roles == CLIENTS)
    paths = {route.path for route in raw.app.routes if isinstance(route, APIRoute)}
    return ", ".join(sorted(path for path in paths if path.startswith(starts)))


async def answered(running: Awaitable[Answer], body: Mapping[str, Any]) -> Answer:
    """Return a handler's answer. What reads a body's tools or a response's input fails in more ways than it names."""
    try:
        return await running
    except Refused as error:
        raise from_error(error.body) from error
    except EngineStopped as error:
        raise UNAVAILABLE from error
    except ODD as error:
        if not (param := next((name for name in ("tools", "input") if body.get(name)), "")):
            raise
        log.warning("a request's %s could not be used: %s", param, place_of(error))
        raise RequestError(400, f"the request's {param} can't be used", param, "invalid_schema") from error


def from_error(body: dict[str, Any]) -> RequestError:
    """Turn the engine's error body into what a client may know; a failure inside is logged by its kind alone."""
    error = body["error"]
    status, param = int(error["code"]), error.get("param")
    message = str(error["message"])[:1000]
    if status == NOT_IMPLEMENTED:
        return RequestError(400, message or "this is not served here", param, "unsupported")
    if status == EngineEnded.STATUS:
        return UNAVAILABLE
    if status >= 500 and status != 503:
        log.error("the engine failed on a request: %s, %d", error.get("type"), status)  # its text may quote the request
        return INTERNAL_ERROR
    is_long = "context length" in message or "maximum model length" in message
    code = "context_length_exceeded" if is_long else "model_not_found" if status == 404 else None
    return RequestError(status, message, param, code)
