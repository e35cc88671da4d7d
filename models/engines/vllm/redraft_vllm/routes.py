"""The routes of a server whose draft can be replaced: `POST /redraft/draft` and `GET /redraft/draft`.

A token of their own guards them (`REDRAFT_ATTACH_TOKEN`); vLLM's own keys do not.
"""

import asyncio
import hmac
import logging
import os
import socket
from pathlib import Path
from typing import Annotated, Any, cast

from fastapi import APIRouter, FastAPI, Header, HTTPException, Request

from . import EXTENSION, ROUTES, file_digest, too_old
from .served import TOKEN, TellingMiddleware
from .swapper import Broken, NotFetched, Order, Refused, Swapper

METRICS = "--per-request-spec-decode-metrics detailed"
STATUSES: dict[type[Exception], int] = {Refused: 409, NotFetched: 502, Broken: 500}

log = logging.getLogger("vllm.redraft")


class DraftRoutes:
    """An endpoint plugin, by vLLM's protocol."""

    name = ROUTES
    required_tasks = ("generate",)

    def attach_router(self, app: FastAPI) -> None:
        """Add the routes, and what tells who answered; of vLLM's protocol."""
        router = APIRouter()

        @router.get("/redraft/draft")
        async def draft(request: Request, authorization: Annotated[str, Header()] = "") -> dict[str, Any]:
            return _swapper(request, authorization).status()

        @router.post("/redraft/draft")
        async def swap(order: Order, request: Request, authorization: Annotated[str, Header()] = "") -> dict[str, Any]:
            try:
                return await _swapper(request, authorization).swap(order)
            except (Refused, NotFetched, Broken) as error:
                raise HTTPException(STATUSES[type(error)], str(error)) from error

        @router.post("/redraft/speculation")
        async def switch(request: Request, authorization: Annotated[str, Header()] = "") -> dict[str, Any]:
            _swapper(request, authorization)
            raise HTTPException(501, "speculation of a stock server can't be switched; replace its draft instead")

        app.include_router(router)
        app.add_middleware(TellingMiddleware)

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        """Find out whether drafts can be replaced here, and say what is missing; of vLLM's protocol."""
        reasons = unsupported(engine_client.vllm_config, args)
        for reason in reasons:
            log.error("redraft can't replace drafts of this server: %s", reason)
        state.redraft_unsupported = reasons
        digest = "" if reasons else await asyncio.to_thread(_start_digest, engine_client.vllm_config)
        state.redraft_swapper = Swapper(engine_client, digest, server=f"{socket.gethostname()}:{args.port}")


def unsupported(config: Any, args: Any) -> list[str]:
    """Return why the draft of a server can't be replaced, by vLLM's configuration and the server's arguments."""
    parallel, speculative, old = config.parallel_config, config.speculative_config, too_old()
    extension = parallel.worker_extension_cls
    found = {
        old: bool(old),
        f"{TOKEN} is not set": not os.environ.get(TOKEN),
        f"start it with --worker-extension-cls {EXTENSION}, not {extension or 'without one'}": extension != EXTENSION,
        "it has no draft: start it with --speculative-config": speculative is None,
        f"start it with {METRICS}, or acceptance is unknown": (
            config.observability_config.per_request_spec_decode_metrics != "detailed"
        ),
        "several engines in one server are not supported": parallel.data_parallel_size > 1,
        "several API servers are not supported": (getattr(args, "api_server_count", None) or 1) > 1,
        "pipeline parallelism is not tested": parallel.pipeline_parallel_size > 1,
        "LoRA is not tested": config.lora_config is not None,
        "KV connectors are not tested": config.kv_transfer_config is not None,
    }
    draft = None if speculative is None else getattr(speculative.draft_model_config, "model", None)
    if draft is not None and not Path(draft).is_dir():
        found[f"its draft {draft} is not a local folder"] = True
    return [reason for reason, applies in found.items() if applies]


def _start_digest(config: Any) -> str:
    """Return the sha256 of the weights that the server starts with, "" if they are in several files."""
    files = sorted(Path(config.speculative_config.draft_model_config.model).glob("*.safetensors"))
    return file_digest(files[0]) if len(files) == 1 else ""


def _swapper(request: Request, authorization: str) -> Swapper:
    token = os.environ.get(TOKEN, "")
    if not token or not hmac.compare_digest(authorization.encode(), f"Bearer {token}".encode()):
        raise HTTPException(401, f"wanted the token of {TOKEN}")
    if reasons := request.app.state.redraft_unsupported:
        raise HTTPException(503, "; ".join(reasons))
    return cast("Swapper", request.app.state.redraft_swapper)
