"""F35: the engine does not start for memory, a place for its sockets or torn files, and the draft is a good one.

F41: it is not to draft at all. And all of it starts, and drains, in a pod.
"""

import asyncio
import json
import os
import signal
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from infra.processes import answers, free_port, wait_until
from infra.versions import is_quarantined, label
from models.core.drafting.draft_format import WEIGHTS
from models.engines.vllm import Params
from models.engines.vllm.engine import VllmEngine
from models.targets import describe
from services.config import ServiceConfig, read_as
from services.drafts import (
    DraftHistory,
    DraftSource,
    Loaded,
    choose_boot_draft,
    recall,
    remember,
    start_engine,
)  # fmt: skip
from services.service import UNDRAFTED, Service
from tests.pod import volume
from tests.test_pod import REDRAFT, in_pod, run
from tests.world import World, make_target

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

PARAMS = Params(max_model_len=128, max_num_seqs=4)


def test_f35_a_good_draft_that_the_machine_did_not_start_with_waits_and_is_never_quarantined(
    tiny_target: Path, engine: Any, loop: asyncio.AbstractEventLoop, tmp_path: Path
) -> None:
    make_target(tiny_target, tmp_path / "target", engine, loop)
    world = World(tmp_path, tmp_path / "target")
    older, newer = world.versions
    world.registry.promote("draft", newer)
    source = DraftSource(world.registry, tmp_path / "cache", describe(world.target), PARAMS.num_draft_tokens)
    state, counts = tmp_path / "state.json", Counter[str]()
    remember(state, DraftHistory().with_good(world.registry.get("draft", older)), counts)

    def restart(faults: dict[int, str]) -> list[int]:
        """Start an engine on a machine that has a fault while some drafts are started; return what was tried."""
        tried: list[int] = []

        async def start(draft: Loaded | None) -> VllmEngine:
            number = draft.version.number if draft else 0
            tried.append(number)
            with pytest.MonkeyPatch.context() as machine:
                match faults.get(number):
                    case "memory":
                        machine.setenv("VLLM_CPU_KVCACHE_SPACE", "1000000")
                    case "sockets":
                        machine.setenv("VLLM_RPC_BASE_PATH", str(tmp_path / "gone"))
                    case "torn" if draft:
                        os.truncate(draft.directory / WEIGHTS, 100)
                directory, name = (draft.directory, str(number)) if draft else (None, "")
                return await VllmEngine.start(world.target, directory, PARAMS, "target", name)

        started, boot, memory = loop.run_until_complete(start_engine(start, source, state, counts))
        loop.run_until_complete(started.close())
        assert tried[-1] == (boot.version.number if boot else 0)
        assert (memory.refused, memory.unreported) == ({}, ())
        assert set(memory.failed_starts) == {label(world.registry.get("draft", number)) for number in tried[:-1]}
        return tried

    assert restart({newer: "memory", older: "torn"}) == [newer, older, 0]
    assert restart({newer: "sockets"}) == [newer, older]  # the torn copy was fetched again
    assert (counts["postponed"], counts["refused"]) == (3, 0)
    boot, _ = choose_boot_draft(source, recall(state, counts), counts)
    assert boot is not None
    assert (boot.version.number, world.champion()) == (newer, newer)
    assert not any(is_quarantined(world.registry.get("draft", number)) for number in (older, newer))


def test_f41_a_recipe_that_drafts_nothing_is_served_without_the_champion_and_says_so_once(
    tiny_target: Path, engine: Any, loop: asyncio.AbstractEventLoop, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_target(tiny_target, tmp_path / "target", engine, loop)
    own = {"name": "vllm", "num_draft_tokens": 0, "max_model_len": 128, "max_num_seqs": 4}
    world = World(tmp_path, tmp_path / "target", engine=own)
    service = loop.run_until_complete(Service.start(read_as(ServiceConfig, world.config())))
    try:
        loop.run_until_complete(service.engine.health())
        told = service.status()
    finally:
        loop.run_until_complete(service.close())
    assert (told.draft_version, told.speculating, told.fallback) == (None, False, UNDRAFTED.fallback)
    assert (told.postponed, told.refused, told.reconciler) == ({}, {}, {})
    assert [record.getMessage() for record in caplog.records].count(str(UNDRAFTED.fallback)) == 1
    assert not any(is_quarantined(world.registry.get("draft", number)) for number in world.versions)


@pytest.mark.timeout(1200)
def test_all_of_it_runs_in_a_pod_is_ready_once_the_draft_is_tested_and_drains_at_its_end(tmp_path: Path) -> None:
    home, recipe, port = volume(tmp_path / "volume"), "--recipe=tiny", free_port()
    built = run((*REDRAFT, "build", recipe), home)
    assert built.returncode == 0, built.stderr
    ready = f"http://127.0.0.1:{port}/readyz"
    up = in_pod((*REDRAFT, "up", "--foreground", recipe, f"--set=serve.port={port}"), home)
    with (tmp_path / "log").open("wb") as log, subprocess.Popen(up, stdout=log, stderr=log) as pod:
        try:
            wait_until(lambda: answers(ready) or pod.poll() is not None, 600, None, ready)
            assert pod.poll() is None, (tmp_path / "log").read_text()
            told = run((*REDRAFT, "status", "--json"), home).stdout
            assert json.loads(told.splitlines()[-1])["service"]["proof"] is not None
            pod.send_signal(signal.SIGTERM)
            assert pod.wait(120) == 0
        finally:
            pod.kill()
    assert "restarting" not in (tmp_path / "log").read_text()
    assert "drained, 0 requests were cut off" in (home / "logs" / "service.log").read_text()
