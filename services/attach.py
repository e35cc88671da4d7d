"""Keep the draft of somebody else's vLLM server at the registry's champion, until a signal comes.

    python -m services.attach --config FILE

The server has the plugin `redraft_vllm`. What follows the registry in a replica of ours follows it here: probation on
golden prompts through the server's own API, canaries, the last good draft again when one fails. A server that comes
back with its start-up draft gets the champion again. Its requests reach the query log by `services/record.py`; without
it the server's metrics tell how its draft does.

Of several servers the first that answers tries a draft, the rest get it once it was proven there. Who may take a draft
follows from rows in a file of the home, so that a proven draft goes on to the rest after a restart too. A server whose
turn has not come is told of no champion, and its last good draft stays.

Servers that see no folder of ours fetch weights at addresses that are signed and expire. The key is the process's own,
so an address is good for a file that this process offered, or for none. Bytes are not secret on the way unless the
address is https, which a proxy before this process has to speak.
"""

import argparse
import asyncio
import hashlib
import hmac
import logging
import os
import secrets
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from socket import SOCK_STREAM, getaddrinfo
from typing import Any
from urllib.parse import urlsplit

import httpx
from aiohttp import web
from pydantic import Field

from infra.cache import hold
from infra.events import EVERY_DOMAIN, Emitter
from infra.querylog import QueryLog
from infra.registry import open_registry
from infra.rollouts import FOLDER, PREFIX, AttachedServer, DraftCounts, RolloutState, read_rollout, write_rollout
from infra.settings import ATTACH_TOKEN
from models.core.evaluation.acceptance import AcceptanceCount
from models.core.evaluation.golden import load_golden
from models.engines.vllm.attached import AttachedEngine, Offer
from models.engines.vllm.redraft_vllm import file_digest
from models.targets import TargetCard, describe
from services.config import ServiceConfig, read_as
from services.drafts import DraftSource, DraftState, Loaded, label, recall
from services.drift import DriftWatch
from services.reconciler import Reconciler, ReplicaHooks
from services.server_metrics import MetricWindows, promised_of_all, read_counts

WEIGHTS = "model.safetensors"
NUM_COUNTED = 4096  # rows that say how the champion does, at one look
RESOLVE_S = 5.0
LIFETIME_S = 600  # of an address of weights
SCHEMES = {"http": 80, "https": 443}
KEPT_PROVEN = 16
NUM_TRIED = 16  # versions among which the draft that a server started with is looked for, newest first

log = logging.getLogger(__name__)


class AttachConfig(ServiceConfig):
    """What is attached to, beside what a service of ours would be started with.

    Attributes:
        servers: their URLs, in the order in which they try a new draft.
        resolve: every address that a URL's host resolves to is a server, now and later.
        server_cache: where the servers see our cache, "" if they see the same paths.
        weights_url: where they reach this process to fetch drafts, "" if they read them.
        read_metrics: drift is detected by the servers' metrics and not by logged rows.
    """

    servers: tuple[str, ...] = Field(min_length=1)
    resolve: bool = False
    server_cache: str = ""
    weights_url: str = ""
    read_metrics: bool = False

    @property
    def rollout(self) -> Path:
        return self.file(PREFIX, *self.servers)

    def file(self, prefix: str, *servers: str) -> Path:
        """Return the file of the home that keeps what is known of servers."""
        digest = hashlib.sha256(" ".join(servers).encode()).hexdigest()
        return self.settings.home / FOLDER / f"{prefix}{digest[:16]}.json"

    def at_path(self, file: Path, _: str = "") -> dict[str, Any]:
        """Return what tells a server by which path it reads the folder of a file in our cache."""
        if not self.server_cache:
            return {"path": str(file.parent)}
        return {"path": str(Path(self.server_cache) / file.parent.relative_to(self.settings.cache))}


class ServerConfig(AttachConfig):
    """What one reconciler follows the registry for: one of the servers."""

    server: str

    @property
    def memory(self) -> Path:
        return self.file("", self.server)


class Rollout(RolloutState):
    """What follows from where all servers stand, and from what is seen of them."""

    @property
    def is_followed(self) -> bool:
        """Whether any server was ever followed."""
        return any(row.version for row in self.rows)

    def may_take(self, server: str, version: str) -> bool:
        """Whether a server may take a draft, by its label, now."""
        return version in self.proven or any(row.server == server and row.wave == 0 for row in self.rows)

    def listed(self, servers: Sequence[str]) -> "Rollout":
        """Return the state when these are the servers: others leave, and new ones come last, in their order."""
        known = {row.server for row in self.rows}
        kept = (row for row in self.rows if row.server in servers)
        new = (AttachedServer(wave=1, server=server) for server in servers if server not in known)
        return _in_waves((*kept, *new), self.proven)

    def saw(
        self, server: str, state: DraftState | None, name: str = "", counts: DraftCounts | None = None
    ) -> "Rollout":
        """Return the state after a look at a server's reconciler; None of a server that does not answer."""
        seen, proven = dict[str, object](state="away"), self.proven
        if state is not None:
            serving = "" if state.serving is None else label(state.serving.version)
            seen = {"state": "serving", "version": serving, "name": name, "counts": counts}
            if serving and state.proof is not None:
                proven = (serving, *(other for other in proven if other != serving))[:KEPT_PROVEN]
        return _in_waves((row.model_copy(update=seen) if row.server == server else row for row in self.rows), proven)


def _in_waves(rows: Iterable[AttachedServer], proven: tuple[str, ...]) -> Rollout:
    """Return the state in which the first that is not known to be away tries new drafts."""
    rows = [*rows]
    first = next((row.server for row in rows if row.state != "away"), "")
    return Rollout(rows=tuple(row.model_copy(update={"wave": int(row.server != first)}) for row in rows), proven=proven)


class RolloutFile:
    """The rollout of the servers that a process follows, on the disk after each change."""

    def __init__(self, path: Path) -> None:
        """Go on with what an earlier process left; a file that can't be read is as none."""
        self._path, left = path, read_rollout(path)
        self.rollout = Rollout(rows=(), proven=() if left is None else left.rollout.proven)

    def become(self, rollout: Rollout) -> None:
        """Keep the state after an event; a full disk costs the memory of a restart."""
        if rollout == self.rollout:
            return
        stood = {_standing(row) for row in self.rollout.rows}
        for row in rollout.rows:
            if _standing(row) not in stood:
                log.info("%s, wave %d: %s, draft %s", *_standing(row))
        self.rollout = rollout
        try:
            write_rollout(self._path, rollout)
        except OSError as error:
            log.warning("where the servers stand was not written: %s", error)


def _standing(row: AttachedServer) -> tuple[str, int, str, str]:
    return row.server, row.wave, row.state, row.version or "unknown"


async def attach(config: AttachConfig, token: str) -> None:
    """Follow the registry for as long as the process runs; a server that is away is waited for.

    Raises NoPlugin if a server never could replace drafts, ValueError if it drafts with what the registry does not know
    or a name resolves to no address at the start, and OSError if the port of the weights can't be bound.
    """
    target = await asyncio.to_thread(describe, config.target_dir)
    if config.target_dir.is_relative_to(config.settings.cache):
        hold(config.target_dir)
    rollout, followed = RolloutFile(config.rollout), dict[str, asyncio.Task[None]]()
    windows = MetricWindows() if config.read_metrics else None
    try:
        async with _offering(config) as offer, asyncio.TaskGroup() as group:
            group.create_task(detect_drift(config, windows))
            async for servers in _listed(config):
                if gone := [followed.pop(server) for server in [*followed] if server not in servers]:
                    for task in gone:
                        task.cancel()
                    await asyncio.wait(gone)
                rollout.become(rollout.rollout.listed(servers))
                for server in servers:
                    if server not in followed:
                        one = ServerConfig(**vars(config), server=server)
                        followed[server] = group.create_task(_keep(one, token, target, rollout, offer, windows))
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None


@asynccontextmanager
async def _offering(config: AttachConfig) -> AsyncIterator[Offer]:
    """Yield what tells a server where a draft's file is, which this process serves as long as the block runs."""
    if config.weights_url:
        async with serving(config.weights_url, config.settings.host) as offer:
            yield offer
    else:
        yield config.at_path


@asynccontextmanager
async def serving(url: str, host: str) -> AsyncIterator[Callable[[Path, str], dict[str, Any]]]:
    """Serve at the port of a URL, by which servers reach this process; OSError if it can't be bound.

    What is yielded offers a file with a sha256: it returns a new address of it, and its size in bytes.
    """
    key, files = secrets.token_bytes(32), dict[str, Path]()

    def sign(path: str, expires: str) -> str:
        return hmac.new(key, f"{path}?{expires}".encode(), "sha256").hexdigest()

    def offer(file: Path, digest: str) -> dict[str, Any]:
        path, expires = f"/drafts/{digest}/{file.name}", str(int(time.time()) + LIFETIME_S)
        files[path] = file
        signed = f"{url.rstrip('/')}{path}?expires={expires}&signature={sign(path, expires)}"
        return {"url": signed, "size": file.stat().st_size}

    async def answer(request: web.Request) -> web.StreamResponse:
        """Answer with a file; 403 whatever is wrong with the address."""
        expires, signature = (request.query.get(name, "") for name in ("expires", "signature"))
        signed = hmac.compare_digest(signature.encode(), sign(request.path, expires).encode())
        if not signed or time.time() > int(expires):
            raise web.HTTPForbidden
        return web.FileResponse(files[request.path])

    parts, app = urlsplit(url), web.Application()
    app.router.add_get("/drafts/{digest}/{name}", answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, parts.port or SCHEMES[parts.scheme]).start()
        yield offer
    finally:
        await runner.cleanup()


async def _listed(config: AttachConfig) -> AsyncIterator[tuple[str, ...]]:
    """Yield the servers: as they were named, or again and again those that their names resolve to."""
    if not config.resolve:
        yield config.servers
        return
    servers, said = tuple[str, ...](), ""
    while True:
        try:
            found = [server for url in config.servers for server in await asyncio.to_thread(resolved, url)]
        except OSError as error:
            if not servers:
                raise ValueError(f"{' or '.join(config.servers)} resolves to no address: {error}") from error
            if str(error) != said:  # once, and not at every try
                log.warning("names can't be resolved now, the servers that they were stay: %s", error)
            said = str(error)
        else:
            servers, said = tuple(dict.fromkeys(found)), ""
            yield servers
        await asyncio.sleep(RESOLVE_S)


def resolved(url: str) -> list[str]:
    """Return a URL for each address of a URL's host, of IPv4 if it has such, so that no server comes twice; OSError."""
    parts = urlsplit(url)
    port = parts.port or SCHEMES[parts.scheme]
    found = getaddrinfo(parts.hostname, port, type=SOCK_STREAM)
    family = min(entry[0] for entry in found)
    hosts = sorted({str(entry[4][0]) for entry in found if entry[0] == family})
    return [parts._replace(netloc=f"[{host}]:{port}" if ":" in host else f"{host}:{port}").geturl() for host in hosts]


async def _keep(
    config: ServerConfig,
    token: str,
    target: TargetCard,
    rollout: RolloutFile,
    offer: Offer,
    windows: MetricWindows | None,
) -> None:
    """Follow the registry for one server; what it refuses later is waited for, too, while any server is followed."""
    server, was_seen, said = config.server, rollout.rollout.is_followed, ""
    counts, events = Counter[str](), Emitter(config.orchestrator)
    goldens, threshold = load_golden(config.target_dir)
    registry, cache, k = open_registry(config.settings), config.settings.cache, config.engine_params().num_draft_tokens
    source = DraftSource(registry, cache, target, k, lambda name: rollout.rollout.may_take(server, name))

    def tell(event: str, text: str) -> None:
        events.emit(event, EVERY_DOMAIN, {"server": server, "told": text})

    def saw(state: DraftState | None, counts: DraftCounts | None = None) -> None:
        rollout.become(rollout.rollout.saw(server, state, engine.server, counts))

    def recent(draft: str) -> list[AcceptanceCount]:
        return counts_of(config, int(draft), 0, config.serve.canary.num_requests, engine.server)

    while True:
        engine = AttachedEngine(server, token, offer)
        try:
            boot = await _boot(engine, source)
            memory = recall(config.memory, counts)
            reconciler = Reconciler(engine, source, goldens, threshold, config, boot, memory, counts)
            reconciler.hooks, was_seen, said = ReplicaHooks(recent=recent, tell=tell), True, ""
            log.info("%s drafts with draft %d", server, boot.version.number)
            while (told := await engine.look())["version"] == engine.draft_version:
                state, metrics = reconciler.state, None
                if windows is not None:
                    metrics = read_counts(server, told["since"])
                    windows.take(server, int(told["version"]), metrics)
                saw(state, metrics)
                await reconciler.look()
                if windows is not None and reconciler.state != state:
                    windows.begin_anew(server)
                await asyncio.sleep(config.serve.poll_s)
            log.warning("%s has another draft than was put there: it was started again", server)
        except (httpx.HTTPError, ValueError, RuntimeError) as error:
            if not isinstance(error, httpx.HTTPError) and not (was_seen and rollout.rollout.is_followed):
                raise
            was_seen = True
            if (text := f"{type(error).__name__}: {error}") != said:  # once, and not at every try
                log.warning("%s can't be followed now: %s", server, text)
            said = text
            saw(None)
            await asyncio.sleep(config.serve.poll_s)
        finally:
            await engine.close()


async def detect_drift(config: AttachConfig, windows: MetricWindows | None = None) -> None:
    """Tell the trigger by the log's rows, or by windows, which domains the champion's drafting fell short in."""
    registry, params = open_registry(config.settings), config.serve.drift_detector
    drift = DriftWatch(params, config.settings.querylog, Emitter(config.orchestrator))

    while True:
        await asyncio.sleep(params.period_s)
        try:
            if (champion := await asyncio.to_thread(registry.champion, "draft")) is not None:
                number, tau = champion.number, champion.lineage.tau
                if windows is None:
                    drift.follow(champion)
                    counts = await asyncio.to_thread(counts_of, config, number, drift.last, NUM_COUNTED)
                else:
                    drift.follow(champion, promised_of_all(tau))
                    counts = windows.of(number, drift.last)
                await drift.hear(counts)
        except (OSError, ValueError) as error:
            log.warning("registry and query log don't tell how the champion does: %s", error)


def counts_of(
    config: AttachConfig, draft: int, after_seq: int, num_rows: int, server: str | None = None
) -> list[AcceptanceCount]:
    """Return what rows say of a draft that name the server which answered them, or of one server those of its name."""
    journal = QueryLog(config.settings.querylog)
    try:
        return [AcceptanceCount(*one) for one in journal.acceptance_counts(draft, after_seq, num_rows, server)]
    finally:
        journal.close()


async def _boot(engine: AttachedEngine, source: DraftSource) -> Loaded:
    """Return the version that a server drafts with, loaded again under its number so that it is verified."""
    found, at_hand = await engine.look(), ""
    for version in (await asyncio.to_thread(source.registry.versions, "draft"))[:NUM_TRIED]:
        try:
            draft = Loaded(version, await asyncio.to_thread(source.fetch, version))
        except (ValueError, OSError) as error:
            log.info("draft %d is passed over: %s", version.number, error)
            continue
        at_hand = at_hand or str(draft.directory)
        if await asyncio.to_thread(file_digest, draft.directory / WEIGHTS) == found["digest"]:
            if found["version"] != str(version.number):
                await engine.swap_draft(draft.directory, str(version.number))
            return draft
    raise ValueError(
        f"{engine.url} drafts with weights {found['digest'][:12] or 'of several files'}, which none of the registry's "
        f"last {NUM_TRIED} drafts has; start it with the folder of one, such as {at_hand or 'redraft build makes'}, or "
        "register its own with redraft import-draft"
    )


def main(argv: list[str] | None = None) -> int:
    """Run until a signal comes; return 2, with a line that says why, if the server can't be attached to."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--config", type=Path, required=True)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    try:
        config = read_as(AttachConfig, parser.parse_args(argv).config)
        if not (token := os.environ.get(ATTACH_TOKEN, "")):
            raise ValueError(f"set {ATTACH_TOKEN} to the token that the server was started with")
        asyncio.run(attach(config, token))
    except (ValueError, RuntimeError, OSError) as error:
        print(f"services.attach: {error}", file=sys.stderr, flush=True)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
