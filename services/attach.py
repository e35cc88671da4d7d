"""Keep the draft of somebody else's vLLM server at the registry's champion, until a signal comes.

    python -m services.attach --config FILE

The server has the plugin `redraft_vllm`. What follows the registry in a replica of ours follows it here: probation on
golden prompts through the server's own API, canaries, the last good draft again when one fails. A server that comes
back with its start-up draft gets the champion again. Its requests reach the query log by `services/record.py`.
"""

import argparse
import asyncio
import hashlib
import logging
import os
import socket
import sqlite3
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
from pydantic import Field

from infra.events import EVERY_DOMAIN, Emitter
from infra.querylog import QueryLog
from infra.registry import open_registry
from infra.rollouts import FOLDER, PREFIX
from infra.settings import ATTACH_TOKEN
from models.core.evaluation.acceptance import AcceptanceCount
from models.core.evaluation.golden import load_golden
from models.engines.vllm.attached import AttachedEngine, Offer
from models.engines.vllm.redraft_vllm import file_digest
from models.targets import TargetCard, describe
from services.config import ServiceConfig, read_as
from services.drafts import DraftHistory, DraftSource, DraftState, Loaded, read_memory
from services.drift import DriftWatch
from services.reconciler import Reconciler, ReplicaHooks
from services.rollout import RolloutFile, RolloutSource
from services.weights import SCHEMES, serving

WEIGHTS = "model.safetensors"
NUM_COUNTED = 4096  # rows that say how the champion does, at one look
RESOLVE_S = 5.0
NUM_TRIED = 16  # versions among which the draft that a server started with is looked for, newest first

LookUp = Callable[..., Sequence[tuple[Any, ...]]]  # as socket.getaddrinfo

log = logging.getLogger(__name__)


class AttachConfig(ServiceConfig):
    """What is attached to, beside what a service of ours would be started with.

    Attributes:
        servers: their URLs, in the order in which they try a new draft.
        resolve: every address that a URL's host resolves to is a server, now and later.
        server_cache: where the servers see our cache, "" if they see the same paths.
        weights_url: where they reach this process to fetch drafts, "" if they read them.
    """

    servers: tuple[str, ...] = Field(min_length=1)
    resolve: bool = False
    server_cache: str = ""
    weights_url: str = ""

    @property
    def rollout(self) -> Path:
        """The file that says where the servers stand."""
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
    """What one reconciler follows the registry for: one of the servers, by its URL."""

    server: str

    @property
    def memory(self) -> Path:
        """The file that remembers good and refused drafts of this server over a restart."""
        return self.file("", self.server)


async def attach(config: AttachConfig, token: str, look_up: LookUp = socket.getaddrinfo) -> None:
    """Follow the registry for as long as the process runs; a server that is away is waited for.

    Raises:
        NoPlugin: a server can't replace drafts, and never could.
        ValueError: it drafts with what the registry does not know, or a name resolves to no address at the start.
        OSError: the port of the weights can't be bound.
    """
    target = await asyncio.to_thread(describe, config.target_dir)
    rollout, followed = RolloutFile(config.rollout), dict[str, asyncio.Task[None]]()
    try:
        async with _offering(config) as offer, asyncio.TaskGroup() as group:
            group.create_task(detect_drift(config))
            async for servers in _listed(config, look_up):
                if gone := [followed.pop(server) for server in [*followed] if server not in servers]:
                    for task in gone:
                        task.cancel()
                    await asyncio.wait(gone)
                rollout.become(rollout.rollout.listed(servers))
                for server in servers:
                    if server not in followed:
                        one = ServerConfig(**vars(config), server=server)
                        followed[server] = group.create_task(_keep(one, token, target, rollout, offer))
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None


@asynccontextmanager
async def _offering(config: AttachConfig) -> AsyncIterator[Offer]:
    """Yield what tells a server where a draft's file is, which this process serves as long as the block runs."""
    if not config.weights_url:
        yield config.at_path
        return
    async with serving(config.weights_url, config.settings.host) as offer:
        yield offer


async def _listed(config: AttachConfig, look_up: LookUp) -> AsyncIterator[tuple[str, ...]]:
    """Yield the servers: as they were named, or again and again those that their names resolve to."""
    if not config.resolve:
        yield config.servers
        return
    servers, said = tuple[str, ...](), ""
    while True:
        try:
            found = [await asyncio.to_thread(resolved, url, look_up) for url in config.servers]
        except OSError as error:
            if not servers:
                raise ValueError(f"{' or '.join(config.servers)} resolves to no address: {error}") from error
            if str(error) != said:  # once, and not at every try
                log.warning("names can't be resolved now, the servers that they were stay: %s", error)
            said = str(error)
        else:
            servers, said = tuple(dict.fromkeys(server for one in found for server in one)), ""
            yield servers
        await asyncio.sleep(RESOLVE_S)


def resolved(url: str, look_up: LookUp = socket.getaddrinfo) -> list[str]:
    """Return a URL for each address that a URL's host has, of IPv4 if it has such, so that no server comes twice.

    Raises:
        OSError: it has none, or nobody can be asked.
    """
    parts = urlsplit(url)
    port = parts.port or SCHEMES[parts.scheme]
    found = look_up(parts.hostname, port, type=socket.SOCK_STREAM)
    family = min(entry[0] for entry in found)
    hosts = sorted({str(entry[4][0]) for entry in found if entry[0] == family})
    return [parts._replace(netloc=f"[{host}]:{port}" if ":" in host else f"{host}:{port}").geturl() for host in hosts]


async def _keep(config: ServerConfig, token: str, target: TargetCard, rollout: RolloutFile, offer: Offer) -> None:
    """Follow the registry for one server; what it refuses later is waited for, too, while any server is followed."""
    server, was_seen, said = config.server, rollout.rollout.is_followed, ""
    counts, events = Counter[str](), Emitter(config.orchestrator)
    goldens, threshold = load_golden(config.target_dir)
    source = RolloutSource(
        open_registry(config.settings),
        config.settings.cache,
        target,
        config.engine_params().num_draft_tokens,
        may_take=lambda name: rollout.rollout.may_take(server, name),
    )

    def tell(event: str, text: str) -> None:
        events.emit(event, EVERY_DOMAIN, {"server": server, "told": text})

    while True:
        engine = AttachedEngine(server, token, offer)
        try:
            boot = await _boot(engine, source)
            memory = _read_memory(config.memory)
            reconciler = Reconciler(engine, source, goldens, threshold, config, boot, memory, counts)
            reconciler.hooks, was_seen, said = ReplicaHooks(tell=tell), True, ""
            log.info("%s drafts with draft %d", server, boot.version.number)
            await _follow(
                reconciler,
                engine,
                config.serve.poll_s,
                lambda state: rollout.become(rollout.rollout.saw(server, state)),
            )
            log.warning("%s has another draft than was put there: it was started again", server)
        except (httpx.HTTPError, ValueError, RuntimeError) as error:
            if not isinstance(error, httpx.HTTPError) and not (was_seen and rollout.rollout.is_followed):
                raise
            was_seen = True
            if (text := f"{type(error).__name__}: {error}") != said:  # once, and not at every try
                log.warning("%s can't be followed now: %s", server, text)
            said = text
            rollout.become(rollout.rollout.saw(server, None))
            await asyncio.sleep(config.serve.poll_s)
        finally:
            await engine.close()


async def detect_drift(config: AttachConfig) -> None:
    """Tell the trigger by the log's rows which domains the champion's drafting fell short in."""
    registry, journal = open_registry(config.settings), QueryLog(config.settings.querylog)
    params = config.serve.drift_detector
    drift = DriftWatch(params, config.settings.querylog, Emitter(config.orchestrator))

    def new(draft: int) -> list[AcceptanceCount]:
        try:
            return [AcceptanceCount(*one) for one in journal.acceptance_counts(draft, drift.last, NUM_COUNTED)]
        finally:
            journal.close()  # each look may come from another thread

    while True:
        await asyncio.sleep(params.period_s)
        try:
            if (champion := await asyncio.to_thread(registry.champion, "draft")) is not None:
                drift.follow(champion)
                await drift.hear(await asyncio.to_thread(new, champion.number))
        except (sqlite3.Error, OSError, ValueError) as error:
            log.warning("registry and query log don't tell how the champion does: %s", error)


async def _follow(
    reconciler: Reconciler, engine: AttachedEngine, poll_s: float, saw: Callable[[DraftState], None]
) -> None:
    """Return once the server has another draft than it was given; `saw` is told how it stands, before each look."""
    while (await engine.look())["version"] == engine.draft_version:
        saw(reconciler.state)
        await reconciler.look()
        await asyncio.sleep(poll_s)


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


def _read_memory(path: Path) -> DraftHistory:
    try:
        return read_memory(path)
    except ValueError as error:
        log.warning("%s; starting without it", error)
        return DraftHistory()


def main(argv: list[str] | None = None, environment: Mapping[str, str] = os.environ) -> int:
    """Run until a signal comes; return 2, with a line that says why, if the server can't be attached to."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--config", type=Path, required=True)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    try:
        config = read_as(AttachConfig, parser.parse_args(argv).config)
        if not (token := environment.get(ATTACH_TOKEN, "")):
            raise ValueError(f"set {ATTACH_TOKEN} to the token that the server was started with")
        asyncio.run(attach(config, token))
    except (ValueError, RuntimeError, OSError) as error:
        print(f"services.attach: {error}", file=sys.stderr, flush=True)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
