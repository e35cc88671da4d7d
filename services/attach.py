"""Keep the draft of somebody else's vLLM server at the registry's champion, until a signal comes.

    python -m services.attach --config FILE

The server has the plugin `redraft_vllm`. What follows the registry in a replica of ours follows it here: probation on
golden prompts through the server's own API, canaries, the last good draft again when one fails. A server that comes
back with its start-up draft gets the champion again. Its requests reach the query log by `services/record.py`; without
it the server's metrics tell how its draft does.

Which of several servers may take a draft follows from their rows in the query log's database (infra/rollouts.py), so
that a rollout goes on after a restart. A server whose turn has not come is told of its last good draft.

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
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from socket import SOCK_STREAM, getaddrinfo
from typing import Any
from urllib.parse import urlsplit

import httpx
from aiohttp import web
from pydantic import Field

from infra.artifacts import hold
from infra.events import EVERY_DOMAIN, Emitter
from infra.registry import open_registry
from infra.rollout_store import ATTACHED, Member, RolloutStore
from infra.rollouts import Away, Joined, Left
from infra.settings import ATTACH_TOKEN
from infra.store import StoreUnavailable
from models.core.evaluation.acceptance import AcceptanceCount
from models.core.evaluation.golden import load_golden
from models.engines.vllm.attached import AttachedEngine, Offer
from models.engines.vllm.redraft_vllm import file_digest
from models.targets import TargetCard, describe
from services.config import ServiceConfig, read_as
from services.drafts import DraftSource, Loaded, recall, standing
from services.drift import DriftWatch, counts_of
from services.reconciler import Reconciler, ReplicaHooks
from services.server_metrics import MetricWindows, promised_of_all, read_counts

WEIGHTS = "model.safetensors"
RESOLVE_S = 5.0
LIFETIME_S = 600  # of an address of weights
SCHEMES = {"http": 80, "https": 443}
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
    def fleet(self) -> str:
        """The name of these servers' rollouts."""
        return f"{ATTACHED} {' '.join(self.servers)}"

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
        """The file of the home that remembers good and refused drafts of the server."""
        digest = hashlib.sha256(self.server.encode()).hexdigest()
        return self.settings.home / "attached" / f"{digest[:16]}.json"


async def attach(config: AttachConfig, token: str) -> None:
    """Follow the registry for as long as the process runs; a server that is away is waited for.

    Raises NoPlugin if a server never could replace drafts, ValueError if it drafts with what the registry does not know
    or a name resolves to no address at the start, and OSError if the port of the weights can't be bound.
    """
    target = await asyncio.to_thread(describe, config.target_dir)
    if config.target_dir.is_relative_to(config.settings.cache):
        hold(config.target_dir)
    rollout = RolloutStore(config.settings.querylog, config.fleet, config.serve.rollout)
    followed = dict[str, asyncio.Task[None]]()
    windows = MetricWindows() if config.read_metrics else None
    try:
        with rollout.taking_part():
            async with _offering(config) as offer, asyncio.TaskGroup() as group:
                group.create_task(detect_drift(config, windows))
                async for servers in _listed(config):
                    left = tuple(server for server in followed if server not in servers)
                    if gone := [followed.pop(server) for server in left]:
                        for task in gone:
                            task.cancel()
                        await asyncio.wait(gone)
                    new = tuple(server for server in servers if server not in followed)
                    if left or new:
                        await asyncio.to_thread(rollout.tell, Left(names=left), Joined(names=new))
                    for server in new:
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
    rollout: RolloutStore,
    offer: Offer,
    windows: MetricWindows | None,
) -> None:
    """Follow the registry for one server; what it refuses later is waited for, too, while any server is followed."""
    server, was_seen, said = config.server, _is_followed(rollout), ""
    counts, events = Counter[str](), Emitter(config.orchestrator)
    goldens, threshold = load_golden(config.target_dir)
    registry, cache, k = open_registry(config.settings), config.settings.cache, config.engine_params().num_draft_tokens
    member = Member(rollout, registry, server)
    source = DraftSource(registry, cache, target, k, member)

    def tell(event: str, text: str) -> None:
        events.emit(event, EVERY_DOMAIN, {"server": server, "told": text})

    def recent(draft: str) -> list[AcceptanceCount]:
        return counts_of(config.settings.querylog, int(draft), 0, config.serve.canary.num_requests, engine.server)

    while True:
        engine = AttachedEngine(server, token, offer)
        try:
            boot = await _boot(engine, source)
            memory = recall(config.memory, counts)
            reconciler = Reconciler(engine, source, goldens, threshold, config, boot, memory, counts)
            reconciler.hooks, was_seen, said = ReplicaHooks(recent=recent, tell=tell), True, ""
            log.info("%s drafts with draft %d", server, boot.version.number)
            while (told := await engine.look())["version"] == engine.draft_version:
                state, member.logged_as = reconciler.state, engine.server
                if windows is not None:
                    member.counts = read_counts(server, told["since"])
                    windows.take(server, int(told["version"]), member.counts)
                await asyncio.to_thread(rollout.tell, standing(member, state))
                await reconciler.look()
                if windows is not None and reconciler.state != state:
                    windows.begin_anew(server)
                await asyncio.sleep(config.serve.poll_s)
            log.warning("%s has another draft than was put there: it was started again", server)
        except (httpx.HTTPError, ValueError, RuntimeError) as error:
            if not isinstance(error, httpx.HTTPError) and not (was_seen and _is_followed(rollout)):
                raise
            was_seen = True
            if (text := f"{type(error).__name__}: {error}") != said:  # once, and not at every try
                log.warning("%s can't be followed now: %s", server, text)
            said = text
            with suppress(StoreUnavailable):  # it is told at the next try
                await asyncio.to_thread(rollout.tell, Away(name=server))
            await asyncio.sleep(config.serve.poll_s)
        finally:
            await engine.close()


def _is_followed(rollout: RolloutStore) -> bool:
    """Return whether any server was ever followed."""
    return any(row.version for row in rollout.seen.rows)


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
                    counts = await asyncio.to_thread(counts_of, config.settings.querylog, number, drift.last)
                else:
                    drift.follow(champion, promised_of_all(tau))
                    counts = windows.of(number, drift.last)
                await drift.hear(counts)
        except (OSError, ValueError) as error:
            log.warning("registry and query log don't tell how the champion does: %s", error)


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
