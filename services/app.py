"""The routes over one service.

Bodies are parsed here and not by FastAPI, which takes NaN, answers errors in a shape of its own and reads a body before
anyone looked at the key.
"""

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC, datetime
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp

from infra.views.dashboard import dashboard
from models.engines.vllm.openai import Answer
from services import metrics
from services.access import INTERNAL_ERROR, PAGE_PATH, RequestError
from services.bodies import bounded
from services.fair_queue import QueuedRequest
from services.handlers import answered, from_error
from services.questions import Origin, check_limits, describe_origin, parse_body, wants_steps
from services.reasoning import HEADER
from services.service import Service
from services.stream import opened

Handler = Callable[[dict[str, Any], Request], Awaitable[Answer]]


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
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(RequestError, _on_refusal)
    app.add_exception_handler(Exception, _on_refusal)  # Starlette raises it again, and Admission logs it

    @app.get("/healthz")
    async def healthz() -> JSONResponse:
        """`{"status": "ok"}`, "degraded" if a background task failed, 503 if the target can't serve. Needs no key."""
        try:
            await service.health()
        except RuntimeError:
            raise RequestError(503, "the target can't serve", code="unhealthy") from None
        return JSONResponse({"status": "degraded" if service.background.failed else "ok"})

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

    @app.post("/v1/chat/completions")
    async def chat(raw: Request) -> Response:
        """OpenAI's chat completions, whole or streamed; `usage.redraft` says what speculation did."""
        if HEADER in raw.headers:
            return await _in_turn(service, raw)
        return await _generate(service, service.handlers.chat, raw)

    @app.post("/v1/completions")
    async def complete(raw: Request) -> Response:
        """OpenAI's completions of raw prompts: special tokens in them are special, unlike in chats; else as above."""
        if HEADER in raw.headers:
            raise RequestError(400, f"{HEADER} is for chats", HEADER, "unsupported")
        return await _generate(service, service.handlers.complete, raw)

    return app


async def _body(raw: Request) -> dict[str, Any]:
    return parse_body(raw.headers.get("content-type", ""), await raw.body())


async def _generate(service: Service, handler: Handler, raw: Request) -> Response:
    body = await _body(raw)
    check_limits(body)
    by_step = wants_steps(raw.headers, raw.scope["redraft.caller"])
    recorder, request_id = service.recorder, raw.scope["redraft.id"]
    origin, turn = await _turn(service, raw, body)
    recorder.expect(origin._replace(domain=service.domains.admit(origin.key, origin.domain)))
    try:
        answer = await answered(handler(body | {"priority": turn.priority}, raw), body)
    except BaseException:
        recorder.forget(request_id)
        raise
    if isinstance(answer, dict):
        if (usage := recorder.usage(request_id, by_step)) is not None:
            answer["usage"]["redraft"] = usage
        recorder.forget(request_id)
        return JSONResponse(answer)
    frames = await opened(
        answer, from_error, lambda: recorder.usage(request_id, by_step), lambda: recorder.forget(request_id)
    )
    return _stream(frames)


async def _turn(service: Service, raw: Request, body: dict[str, Any]) -> tuple[Origin, QueuedRequest]:
    """Say what is known of a request, and wait until it may run."""
    origin = describe_origin(raw.scope["redraft.id"], raw.headers, body, raw.scope["redraft.caller"], service.secret)
    turn = await service.turns.take(origin.key, service.turns.cost(origin.key, body, len(await raw.body())))
    raw.scope["redraft.at_end"].append(turn.end)
    return origin, turn


def _stream(frames: AsyncIterator[str]) -> StreamingResponse:
    return StreamingResponse(frames, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})


async def _in_turn(service: Service, raw: Request) -> Response:
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


async def _on_http_error(_: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    message = {404: "there is no such path", 405: "this path takes another method"}.get(status, "bad request")
    return RequestError(status, message).response()


async def _on_refusal(_: Request, error: Exception) -> Response:
    return error.response() if isinstance(error, RequestError) else INTERNAL_ERROR.response()
