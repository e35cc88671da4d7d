"""What a draft of one engine is replaced by, for the routes of a stock server and for the embedded engine.

A draft is committed once every rank has staged it, and verified on every rank afterwards; where that fails the one
before it is loaded again.
"""

import asyncio
import hashlib
import ipaddress
import os
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import urlsplit

import requests
from pydantic import BaseModel, ConfigDict, Field, model_validator

from . import WEIGHTS

RESET_RUNNING = "REDRAFT_RESET_RUNNING_REQUESTS"  # "1": preempt running requests, so that no old key remains
STAGE_S, CALL_S, POLL_S, RESET_S = 300.0, 60.0, 0.02, 0.5
ANSWER_S, FETCH_S, BLOCK = 30.0, 240.0, 1 << 20  # of a download
MOST_CHARS = 128
TOLERANCE = 0.02  # of bfloat16 products, relative to the largest value


class Order(BaseModel):
    """A draft that is to be served."""

    model_config = ConfigDict(extra="forbid")

    version: str = Field(min_length=1, max_length=MOST_CHARS)
    path: str = ""  # a folder that every rank can read, with `model.safetensors` in it
    url: str = Field(default="", pattern="^(https?://.+)?$")  # of that file, where it is to be fetched from instead
    size: int = Field(default=0, ge=0)  # in bytes
    sha256: str = Field(pattern="^[0-9a-f]{64}$")  # of that file
    # Of the draft in the engine, by the file's tensors that they are stacked of.
    parameters: dict[str, list[str]] = Field(min_length=1)

    @model_validator(mode="after")
    def _says_where(self) -> "Order":
        if (bool(self.path), bool(self.url), bool(self.size)) not in ((True, False, False), (False, True, True)):
            raise ValueError("wanted either path, or url and size")
        return self


class Refused(Exception):
    """The draft is not served, and what served before still is."""


class NotFetched(Exception):
    """The draft could not be had, which says nothing about it; what served before still is."""


class Broken(Exception):
    """It is not known what the ranks hold."""


class Swapper:
    """Replaces the draft of one engine, one at a time.

    Its state is "serving"; "old keys remain" while the prefix cache holds keys of the draft before; "unknown" if a rank
    could not be brought back.
    """

    def __init__(self, engine: Any, digest: str = "", tolerance: float = TOLERANCE, server: str = "") -> None:
        """Take the name by which a stock server is told from others."""
        self.server = server
        self._engine, self._tolerance = engine, tolerance
        self._loads = 0  # how often a load began or ended
        self.lock = asyncio.Lock()  # held by whoever stages, commits or verifies
        self._cleaning: asyncio.Task[None] | None = None
        self.version, self.digest, self.state = "start-up", digest, "serving"
        self.worst = 0.0  # by how much a parameter was off from its file at most when the draft was loaded
        self._since = _counters()

    def status(self) -> dict[str, Any]:
        """Return what serves, and what was drafted and accepted since it does."""
        now = _counters()
        since = {name: now[name] - self._since.get(name, 0.0) for name in now}
        drafts = since.get("drafts", 0.0)
        tau = 1 + since.get("accepted", 0.0) / drafts if drafts else None
        told = {"version": self.version, "digest": self.digest, "state": self.state, "worst": self.worst}
        return told | {"server": self.server} | {"since": since | {"mean_accepted_length": tau}}

    def served(self) -> tuple[int, str] | None:
        """Return how often a draft was loaded, and the version; None while it is not known what drafts."""
        return None if self._loads % 2 or self.state == "unknown" else (self._loads, self.version)

    async def swap(self, order: Order) -> dict[str, Any]:
        """Stage, commit and verify another draft, as stock servers do; raises Refused, NotFetched or Broken."""
        async with self.lock:
            began = time.monotonic()
            if await self._engine.is_sleeping():
                raise Refused("the server sleeps; wake it first")
            await self.stage(order)
            self._loads += 1
            try:
                loaded_s = await self._load(order)
            finally:
                self._loads += 1
            return {
                **self.status(),
                "load_ms": 1000 * loaded_s,
                "ms": 1000 * (time.monotonic() - began),
            }

    async def _load(self, order: Order) -> float:
        began = time.monotonic()
        emptied = await self.commit(order)
        loaded_s = time.monotonic() - began
        try:
            worst = await self.verify(order)
        except Refused as refused:
            await self._revert(str(refused))
            raise
        await self._engine.update_weight_version(order.version)
        self.version, self.digest, self.worst, self._since = order.version, order.sha256, worst, _counters()
        self._note_cache(emptied)
        return loaded_s

    async def stage(self, order: Order) -> None:
        """Have every rank read and check a draft while it serves; raises Refused or NotFetched."""
        try:
            await self._read(order, order.path)
        except Refused:
            if not order.url:
                raise
        else:  # a draft that is put back is in memory
            return
        with TemporaryDirectory(prefix="redraft-") as folder:
            try:
                await asyncio.to_thread(download, order.url, Path(folder) / WEIGHTS, order.size, order.sha256)
            except (OSError, ValueError) as error:
                raise NotFetched(f"draft {order.version} could not be fetched: {error}") from error
            await self._read(order, folder)

    async def _read(self, order: Order, path: str) -> None:
        args = (order.version, path, order.sha256, order.parameters)
        deadline_s = time.monotonic() + STAGE_S
        try:
            _require_ok(await self._call("redraft_stage", *args))
            while True:
                answers = await self._call("redraft_staged", order.version)
                _require_ok(answers)
                if not any(one["reading"] for one in answers):
                    return
                if time.monotonic() > deadline_s:
                    raise Refused(f"draft {order.version} was not read in {STAGE_S:g} s")
                await asyncio.sleep(POLL_S)
        except Refused:
            await self.discard()
            raise

    async def commit(self, order: Order) -> bool:
        """Load what was staged, and empty the prefix cache; return whether that was done, as well.

        Where it raises what `swap` does, all ranks have loaded the draft before.
        """
        commit = self._call("redraft_commit", order.version)
        # The engine takes what it is sent in order: no request is read between the two.
        answers, emptied = await asyncio.gather(commit, self._empty_cache())
        try:
            _require_ok(answers)
        except Refused as refused:
            await self._revert(str(refused))
            raise
        return bool(emptied)

    async def verify(self, order: Order, staged: bool = False) -> float:
        """Return by how much a parameter of the loaded draft is off at most from its file, or from what is staged.

        Refused if it is more than rounding explains.
        """
        worst = 0.0
        for parameter in ("", *order.parameters):  # one at a time, because every stream waits meanwhile
            answers = await self._call("redraft_verify", parameter, order.version if staged else "")
            _require_ok(answers)
            worst = max(worst, *(float(one["worst"]) for one in answers))
            if not worst <= self._tolerance:
                name = parameter or "derived"
                raise Refused(f"parameter {name} of the loaded draft is off by {worst:.3g} from the file's weights")
        return worst

    async def discard(self) -> None:
        """Forget what is staged."""
        await self._call("redraft_discard")

    async def _revert(self, why: str) -> None:
        answers, emptied = await asyncio.gather(self._call("redraft_revert"), self._empty_cache())
        if failed := [one for one in answers if not one["ok"]]:
            self.state = "unknown"
            raise Broken(f"{why}; the draft before could not be put back: {failed[0]['error']}; restart the server")
        self._note_cache(emptied)

    async def _empty_cache(self) -> bool:
        return bool(await self._engine.reset_prefix_cache(os.environ.get(RESET_RUNNING) == "1"))

    def _note_cache(self, emptied: bool) -> None:
        """Empty the prefix cache again once the engine is idle, where it was refused because requests ran."""
        self.state = "serving" if emptied else "old keys remain"
        if not emptied and (self._cleaning is None or self._cleaning.done()):
            self._cleaning = asyncio.create_task(self._clean())

    async def _clean(self) -> None:
        while not await self._empty_cache():
            await asyncio.sleep(RESET_S)
        if self.state == "old keys remain":
            self.state = "serving"

    async def _call(self, method: str, *args: object) -> list[dict[str, Any]]:
        try:
            return list(await self._engine.collective_rpc(method, timeout=CALL_S, args=args))
        except Exception as error:  # vLLM's errors of a worker are of many kinds
            self.state = "unknown"
            raise Broken(f"{method}: {type(error).__name__}: {error}") from error


def _require_ok(answers: Sequence[dict[str, Any]]) -> None:
    if failed := [one for one in answers if not one["ok"]]:
        raise Refused("; ".join(f"rank {one['rank']}: {one['error']}" for one in failed))


def _counters() -> dict[str, float]:
    """Return vLLM's own counts of speculation, by position as "accepted_0" and so on; empty where it keeps none."""
    from prometheus_client import REGISTRY

    names = {
        "vllm:spec_decode_num_drafts": "drafts",
        "vllm:spec_decode_num_draft_tokens": "drafted",
        "vllm:spec_decode_num_accepted_tokens": "accepted",
        "vllm:spec_decode_num_accepted_tokens_per_pos": "accepted_",
    }
    found = dict[str, float]()
    for metric in REGISTRY.collect():
        for one in metric.samples if metric.name in names else ():
            if one.name.endswith("_total"):  # one for each place of a draft, where it is by position
                name = names[metric.name] + one.labels.get("position", "")
                found[name] = found.get(name, 0.0) + one.value
    return found


def download(url: str, file: Path, size: int, sha256: str) -> None:
    """Write what a URL answers into a new file; redirects are not followed, and no proxy is asked for this machine's.

    Raises:
        ValueError: the answer has another status, length or sum, or the transfer failed; does not tell the URL's query.
        OSError: the file can't be written.
    """
    digest, num_bytes, until_s = hashlib.sha256(), 0, time.monotonic() + FETCH_S
    try:
        with requests.Session() as session:
            session.trust_env = not _is_loopback(urlsplit(url).hostname or "")
            unpacked = {"Accept-Encoding": "identity"}
            answer = session.get(url, stream=True, allow_redirects=False, timeout=ANSWER_S, headers=unpacked)
            with answer, file.open("wb") as out:
                told = answer.headers.get("Content-Length")
                if answer.status_code != requests.codes.ok or told != str(size):
                    raise ValueError(f"the answer is {answer.status_code} with {told} bytes, wanted 200 with {size}")
                for block in answer.iter_content(BLOCK):
                    digest.update(block)
                    out.write(block)
                    num_bytes += len(block)
                    if num_bytes > size or time.monotonic() > until_s:
                        raise ValueError(f"{num_bytes} bytes came, wanted {size} in {FETCH_S:g} s")
    except requests.RequestException as error:
        raise ValueError(f"{type(error).__name__}: {str(error).replace(urlsplit(url).query, '…')}") from None
    if digest.hexdigest() != sha256:
        raise ValueError(f"{num_bytes} bytes came with sha256 {digest.hexdigest()}, wanted {size} with {sha256}")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
