"""A vLLM server that somebody else runs, asked over HTTP; its draft is replaced by the plugin `redraft_vllm`.

Its speculation can't be switched off. So where an output differs from the reference, draft and target can't be told
apart: the draft is not served, and not quarantined either.
"""

import asyncio
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import httpx

from models.core.drafting.draft_families import family_of
from models.engines import Completion, NotSwitchable, OnFirstToken, Sampling
from models.engines.vllm.redraft_vllm import file_digest

ANSWER_S, SWAP_S = 120.0, 600.0
REFUSED = 409
# Returns, of a file and its sha256, what tells a server where it is: `path` of its folder, or `url` and `size`.
Offer = Callable[[Path, str], Mapping[str, Any]]


class NoPlugin(ValueError):
    """The server can't replace drafts, or not for this token; says what to do."""


class AttachedEngine:
    """Follows the protocol `models.engines.Engine`.

    `digest` is that of the weights that the server drafts with, `server` the name that its answers tell.
    """

    speculating = True  # always

    def __init__(self, url: str, token: str, offer: Offer = lambda file, _: {"path": str(file.parent)}) -> None:
        """Take its URL without `/v1`, and the plugin's token; by default it reads a file at the path that we do."""
        self.url = url.rstrip("/")
        self._http = httpx.AsyncClient(base_url=self.url, timeout=ANSWER_S, trust_env=False)
        self._token, self._offer = {"Authorization": f"Bearer {token}"}, offer
        self._model = ""
        self.draft_version = self.digest = self.server = ""

    async def look(self) -> dict[str, Any]:
        """Return what the server says of its draft; NoPlugin if it says something else, httpx.HTTPError if nothing."""
        answer = await self._http.get("/redraft/draft", headers=self._token)
        if answer.status_code != httpx.codes.OK:
            raise NoPlugin(f"{self.url}/redraft/draft answers {answer.status_code}: {_detail(answer)}; {WANTED}")
        found: dict[str, Any] = answer.json()
        self.digest, self.server = found["digest"], found["server"]
        self.draft_version = self.draft_version or found["version"]
        return found

    async def generate(
        self, prompt_ids: list[int], sampling: Sampling, request_id: str, on_first_token: OnFirstToken | None = None
    ) -> Completion:
        """See `models.engines.Engine`; priority and piece are the server's own matter."""
        body = {
            "model": await self._served_model(),
            "prompt": prompt_ids,
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "seed": sampling.seed,
            "ignore_eos": sampling.ignore_eos,
            "stop_token_ids": list(sampling.stop_ids),
            "return_token_ids": True,
            "stream": True,
            "stream_options": {"include_usage": True},  # the last chunk tells how it was drafted
        }
        token_ids: list[int] = []
        told: dict[str, Any] = {}
        finish_reason: str | None = None
        began_s = first_s = last_s = time.monotonic()
        async with self._http.stream("POST", "/v1/completions", json=body) as answer:
            if answer.status_code == httpx.codes.BAD_REQUEST:
                await answer.aread()
                raise ValueError(_detail(answer))
            answer.raise_for_status()
            async for line in answer.aiter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                chunk = json.loads(line.removeprefix("data: "))
                told = (chunk.get("metrics") or {}).get("speculative_decoding") or told
                for choice in chunk["choices"]:
                    finish_reason = choice.get("finish_reason") or finish_reason
                    if new := choice.get("token_ids"):
                        last_s = time.monotonic()
                        if not token_ids:
                            first_s = last_s
                            if on_first_token is not None:
                                on_first_token()
                        token_ids += new
        return Completion(
            request_id=request_id,
            prompt_ids=tuple(prompt_ids),
            token_ids=tuple(token_ids),
            drafted=tuple(told.get("per_step_drafted", ())),
            accepted=tuple(told.get("per_step_accepted", ())),
            drafted_ids=(),
            finish_reason=finish_reason,
            first_token_ms=1000 * (first_s - began_s),
            per_token_ms=1000 * (last_s - first_s) / max(1, len(token_ids) - 1),
            draft_version=self.draft_version,
            speculating=True,
        )

    async def swap_draft(self, directory: Path, version: str) -> float:
        """Have the server replace its draft, checked before and verified after; return its milliseconds.

        Raises:
            ValueError: the draft is refused, and what served before still does.
            RuntimeError: the server does not know what it serves, or could not fetch the draft.
            httpx.HTTPError: it does not answer; what it serves is not known.
        """
        if (weights := family_of(directory).vllm_weights(directory)) is None:
            raise ValueError(f"draft {directory.name} has no weights that a server could load")
        sha256 = await asyncio.to_thread(file_digest, weights.file)
        order = {"version": version, "sha256": sha256, "parameters": weights.parameters}
        order |= self._offer(weights.file, sha256)
        answer = await self._http.post("/redraft/draft", json=order, headers=self._token, timeout=SWAP_S)
        if answer.status_code == REFUSED:
            raise ValueError(_detail(answer))
        if answer.status_code != httpx.codes.OK:
            raise RuntimeError(f"{self.url} answers {answer.status_code}: {_detail(answer)}")
        found = answer.json()
        self.draft_version, self.digest = version, found["digest"]
        return float(found["ms"])

    async def check_draft(self, directory: Path) -> float:
        """Return by how much the server's modules were off from a draft's file after it was loaded."""
        weights = family_of(directory).vllm_weights(directory)
        found = await self.look()
        if weights is None or found["digest"] != await asyncio.to_thread(file_digest, weights.file):
            raise ValueError(
                f"{self.url} serves weights {found['digest'][:12]}, which are not those of {directory.name}"
            )
        return float(found["worst"])

    async def set_speculation(self, on: bool) -> None:
        """Do nothing if it is to be on; NotSwitchable if not."""
        if not on:
            raise NotSwitchable(f"speculation of {self.url} can't be switched off from outside")

    async def health(self) -> None:
        """Raise RuntimeError when the server does not say that it is well."""
        try:
            (await self._http.get("/health")).raise_for_status()
        except httpx.HTTPError as error:
            raise RuntimeError(f"{self.url}/health: {error}") from error

    async def close(self) -> None:
        """Close the connections; the server goes on."""
        await self._http.aclose()

    async def _served_model(self) -> str:
        if not self._model:
            self._model = (await self._http.get("/v1/models")).raise_for_status().json()["data"][0]["id"]
        return self._model


WANTED = (
    "install redraft_vllm in the server's environment, set VLLM_PLUGINS=redraft,redraft_notice and "
    "REDRAFT_ATTACH_TOKEN, and start it with --worker-extension-cls redraft_vllm.worker.DraftExtension"
)


def _detail(answer: httpx.Response) -> str:
    """Return what an error says; vLLM puts its own routes' and its plugins' into an object `error`."""
    try:
        told = answer.json()
    except ValueError:
        return answer.text[:200]
    found = (told.get("error") or told.get("detail") or told) if isinstance(told, dict) else told
    return str(found.get("message", found) if isinstance(found, dict) else found)
