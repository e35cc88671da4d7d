"""Who is followed, and what is told before; how a real server is, `test_redraft_vllm` tries."""

import asyncio
import json
import shutil
import socket
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from infra.artifacts import staged
from infra.querylog import QueryLog
from infra.registry import open_registry
from infra.rollout_store import fleets_of
from infra.rollouts import Replica
from infra.service_process import attach_program
from infra.settings import ATTACH_TOKEN, Settings
from infra.trigger_store import TriggerStore
from infra.triggers import Fallen
from models.core.evaluation.golden import Golden, save_golden
from models.engines.vllm.redraft_vllm import file_digest
from models.targets import describe
from services import attach as attaching
from services.attach import AttachConfig, ServerConfig, attach, detect_drift, main, resolved
from services.drift import counts_of
from tests.infra.rows import row
from tests.services.played import PlayedServer, Request, head
from tests.tags import draft_tags

WAIT_S = 120.0


def config(home: Path, **changed: object) -> dict[str, object]:
    settings = Settings(home=home).model_dump(mode="json")
    whole = {"target_dir": str(home / "target"), "settings": settings, "serve": {"port": 8000}}
    return {**whole, "servers": ["http://127.0.0.1:8001"], **changed}


def test_without_the_servers_token_nothing_is_followed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(ATTACH_TOKEN, raising=False)
    file = tmp_path / "attach.json"
    file.write_text(json.dumps(config(tmp_path)))
    assert main(["--config", str(file)]) == 2
    assert ATTACH_TOKEN in capsys.readouterr().err


@pytest.mark.parametrize("server", ["127.0.0.1:8001", "ftp://host", "http://"])
def test_what_is_no_address_is_refused(tmp_path: Path, server: str) -> None:
    with pytest.raises(ValueError, match="wanted a URL"):
        attach_program(config(tmp_path, servers=[server]), Settings(home=tmp_path))


def test_a_server_that_is_named_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="http://127.0.0.1:1 is named 2 times"):
        attach_program(config(tmp_path, servers=["http://127.0.0.1:1"] * 2), Settings(home=tmp_path))


def test_drafts_are_either_read_or_fetched_and_from_an_address(tmp_path: Path) -> None:
    both = config(tmp_path, server_cache="/mnt", weights_url="http://127.0.0.1:9000")
    for wrong, said in ((both, "--server-cache"), (config(tmp_path, weights_url="here:9000"), '"here:9000"')):
        with pytest.raises(ValueError, match=said):
            attach_program(wrong, Settings(home=tmp_path))


def test_a_server_may_see_the_cache_elsewhere_and_has_a_memory_of_its_own(tmp_path: Path) -> None:
    here, there = (
        ServerConfig.model_validate(config(tmp_path, server=server, server_cache=cache))
        for server, cache in (("http://one", ""), ("http://other", "/mnt/drafts"))
    )
    file = here.settings.cache / "draft" / "2-ab" / "model.safetensors"
    assert [one.at_path(file)["path"] for one in (here, there)] == [str(file.parent), "/mnt/drafts/draft/2-ab"]
    assert here.memory != there.memory


def test_what_servers_did_worse_than_the_champion_promised_is_told_to_the_trigger(store: Path, tmp_path: Path) -> None:
    shutil.copy(store, tmp_path / "mlflow.db")
    attached = AttachConfig.model_validate(
        config(tmp_path, serve={"port": 1, "drift_detector": {"min_requests": 8, "period_s": 0.05}})
    )
    registry, querylog = open_registry(attached.settings), attached.settings.querylog
    for name in ("one", "two"):
        with staged(tmp_path / name) as directory:
            (directory / "weights").write_text(name)
        champion = registry.register("draft", tmp_path / name, draft_tags(tau=json.dumps({"code": 2.5, "chat": 2.5})))
    registry.promote("draft", champion.number)
    journal, one = QueryLog(querylog), {"drafting": "head", "drafted": [3] * 20, "server": "host:1"}
    for at, (domain, draft, accepted) in enumerate([("code", 2, 0), ("chat", 2, 2), ("chat", 1, 0)] * 40):
        said = one | {"draft_version": draft, "accepted": [accepted] * 20}
        journal.append([row(f"r{at}", domain).model_copy(update=said)])

    async def until_told() -> None:
        detecting, until = asyncio.create_task(detect_drift(attached)), time.monotonic() + WAIT_S
        while "code" not in TriggerStore(querylog).state().domains:
            assert time.monotonic() < until and not detecting.done()
            await asyncio.sleep(0.05)
        detecting.cancel()

    asyncio.run(until_told())
    told = TriggerStore(querylog).state().domains
    assert isinstance(fallen := told["code"], Fallen)
    assert (fallen.fall.draft, fallen.fall.promised, fallen.fall.served) == (champion.number, 2.5, 1.0)
    assert not isinstance(told.get("chat"), Fallen)


def rows(home: Path) -> list[Replica]:
    return [row for fleet in fleets_of(Settings(home=home).querylog).values() for row in fleet.rows]


def test_a_servers_draft_is_judged_by_the_rows_that_name_both(tmp_path: Path) -> None:
    querylog = Settings(home=tmp_path).querylog
    assert counts_of(querylog, 2, 0, 9, "host:1") == []
    head = {"drafted": [3, 3], "accepted": [1, 0], "draft_version": 2}
    said = [{"server": "host:1"}, {"server": "host:2"}, {}, {"server": "host:1", "draft_version": 1}]
    log = QueryLog(querylog)
    log.append([row(f"r{at}").model_copy(update=head | one) for at, one in enumerate(said)])
    log.close()
    assert [one.number for one in counts_of(querylog, 2, 0, 9, "host:1")] == [1]
    assert [one.number for one in counts_of(querylog, 2, 0, 9)] == [1, 2]


def addresses(*hosts: str) -> list[tuple[Any, ...]]:
    """Return what socket.getaddrinfo says of a name."""
    families = (socket.AF_INET6 if ":" in host else socket.AF_INET for host in hosts)
    return [(family, socket.SOCK_STREAM, 6, "", (host, 0)) for family, host in zip(families, hosts, strict=True)]


def test_a_name_is_a_server_for_each_of_its_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolved("http://localhost:8000/base") == ["http://127.0.0.1:8000/base"]
    both = addresses("fd00::2", "10.0.0.2", "10.0.0.1", "10.0.0.2")
    monkeypatch.setattr(attaching, "getaddrinfo", lambda *_, **__: both)
    assert resolved("http://name") == ["http://10.0.0.1:80", "http://10.0.0.2:80"]
    del both[1:]
    assert resolved("https://name") == ["https://[fd00::2]:443"]


@pytest.fixture
def home(tiny_target: Path, tiny_draft: Path, store: Path, tmp_path: Path) -> Path:
    """A home with a target, and one draft for it."""
    (home := tmp_path / "home").mkdir()
    shutil.copy(store, home)
    target = shutil.copytree(tiny_target, home / "target")
    save_golden(target, [Golden(prompt_ids=(7, 8), token_ids=(9,), gaps=(1.0,))], threshold=1e-2)
    card = describe(target)
    with staged(tmp_path / "made") as directory:
        shutil.copytree(tiny_draft, directory, dirs_exist_ok=True)
    tags = {"target_sha256": card.sha256, "tokenizer_sha256": card.tokenizer_sha256, "golden_tau": "1.0"}
    tags |= {"vocab_size": str(card.vocab_size)}
    open_registry(Settings(home=home)).register("draft", tmp_path / "made", draft_tags() | tags)
    return home


def with_plugin(draft: Path, *counted: float) -> Callable[[Request], AsyncIterator[bytes]]:
    """Play a server that drafts with a draft, and generates nothing; at each look it has counted more of traffic."""
    since = dict.fromkeys(("drafts", "drafted", "accepted", "accepted_0")[: len(counted)], 0.0)
    told = {"version": "1", "digest": file_digest(draft / "model.safetensors"), "state": "serving", "worst": 0.0}
    told |= {"server": "host:8000"}

    async def play(request: Request) -> AsyncIterator[bytes]:
        for name, more in zip(since, counted, strict=True):
            since[name] += more
        found = json.dumps(told | {"since": since}).encode() if request.target == "/redraft/draft" else b"{}"
        status = "200 OK" if request.target == "/redraft/draft" else "503 Service Unavailable"
        yield head("application/json", status, length=len(found)) + found

    return play


async def no_plugin(request: Request) -> AsyncIterator[bytes]:
    yield head("application/json", "404 Not Found", length=2) + b"{}"


async def until(holds: Callable[[], bool], following: asyncio.Task[None]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not holds():
            if following.done():
                following.result()
            await asyncio.sleep(0.02)


def test_servers_join_and_leave_as_their_name_resolves(
    home: Path, tiny_draft: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attaching, "RESOLVE_S", 0.05)
    monkeypatch.setattr(attaching, "getaddrinfo", lambda *_, **__: look_up())
    found: list[tuple[Any, ...]] = addresses("127.0.0.1")
    num_looks = 0

    def look_up() -> list[tuple[Any, ...]]:
        nonlocal num_looks
        num_looks += 1
        if not found:
            raise socket.gaierror(socket.EAI_AGAIN, "no name server answers")
        return [*found]

    def stand() -> list[tuple[str, str]]:
        return [(row.name.split(":")[1], row.state) for row in rows(home)]

    async def run() -> None:
        async with PlayedServer(with_plugin(tiny_draft)) as first:
            port = int(first.url.rpartition(":")[2])
            told = config(home, servers=[f"http://servers:{port}"], resolve=True, serve={"port": 1, "poll_s": 0.1})
            following = asyncio.create_task(attach(AttachConfig.model_validate(told), "token"))
            await until(lambda: stand() == [("//127.0.0.1", "serving")], following)
            async with PlayedServer(no_plugin, host="127.0.0.2", port=port):  # which ends nothing
                found[:] = addresses("127.0.0.2", "127.0.0.1")
                await until(lambda: stand() == [("//127.0.0.1", "serving"), ("//127.0.0.2", "away")], following)
            found.clear()
            before, stood = num_looks, stand()
            await until(lambda: num_looks >= before + 3, following)
            assert stand() == stood
            found[:] = addresses("127.0.0.2")
            await until(lambda: stand() == [("//127.0.0.2", "away")], following)
            asked = len(first.requests)
            before = num_looks
            async with PlayedServer(with_plugin(tiny_draft), host="127.0.0.2", port=port):
                await until(lambda: stand() == [("//127.0.0.2", "serving")], following)
            assert len(first.requests) == asked and num_looks > before  # who left is asked no more
            following.cancel()
            await asyncio.wait([following])

    asyncio.run(run())


def test_with_metrics_alone_a_fall_of_all_traffic_is_told_and_counts_stand_in_the_rollout(
    home: Path, tiny_draft: Path
) -> None:
    settings, stood = Settings(home=home), list[Replica]()
    registry = open_registry(settings)
    registry.promote("draft", 1)
    registry.store.client.set_model_version_tag("draft", "1", "tau", json.dumps({"code": 2.5, "chat": 1.8}))

    async def run() -> None:
        serve = {"port": 1, "poll_s": 0.02, "drift_detector": {"min_requests": 8, "period_s": 0.1}}
        async with PlayedServer(with_plugin(tiny_draft, 600, 1800, 60, 60)) as server:
            told = config(home, servers=[server.url], serve=serve, read_metrics=True)
            following = asyncio.create_task(attach(AttachConfig.model_validate(told), "token"))
            await until(lambda: "other" in TriggerStore(settings.querylog).state().domains, following)
            stood.extend(rows(home))
            following.cancel()
            await asyncio.wait([following])

    asyncio.run(run())
    assert isinstance(fallen := TriggerStore(settings.querylog).state().domains["other"], Fallen)
    assert (fallen.fall.promised, fallen.fall.served) == (1.8, pytest.approx(1.1))
    [row] = stood
    assert (row.logged_as, row.counts is not None and row.counts.per_position[0] * 10) == (
        "host:8000",
        row.counts.steps,
    )


def test_a_server_that_keeps_no_metrics_is_told_at_the_start(home: Path, tiny_draft: Path) -> None:
    async def run() -> None:
        async with PlayedServer(with_plugin(tiny_draft)) as server:
            await attach(AttachConfig.model_validate(config(home, servers=[server.url], read_metrics=True)), "token")

    with pytest.raises(ValueError, match="keeps no metrics"):
        asyncio.run(run())


def test_a_name_without_an_address_is_told_at_the_start(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def look_up(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(attaching, "getaddrinfo", look_up)
    told = AttachConfig.model_validate(config(home, servers=["http://servers:1"], resolve=True))
    with pytest.raises(ValueError, match="http://servers:1 resolves to no address: .*not known"):
        asyncio.run(attach(told, "token"))
