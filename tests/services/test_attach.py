"""What is told before somebody else's server is followed; how it is, `test_redraft_vllm` tries on a real one."""

import asyncio
import json
import shutil
import time
from pathlib import Path

import pytest

from infra.artifacts import staged
from infra.querylog import QueryLog
from infra.registry import open_registry
from infra.service_process import attach_program
from infra.settings import ATTACH_TOKEN, Settings
from infra.triggerfile import TriggerFile
from infra.triggers import Fallen
from services.attach import AttachConfig, detect_drift, main
from tests.infra.rows import row
from tests.tags import draft_tags

WAIT_S = 60


def config(home: Path, **changed: object) -> dict[str, object]:
    settings = Settings(home=home).model_dump(mode="json")
    whole = {"target_dir": str(home / "target"), "settings": settings, "serve": {"port": 8000}}
    return {**whole, "servers": ["http://127.0.0.1:8001"], **changed}


def test_without_the_servers_token_nothing_is_followed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "attach.json"
    file.write_text(json.dumps(config(tmp_path)))
    assert main(["--config", str(file)], {}) == 2
    assert ATTACH_TOKEN in capsys.readouterr().err


@pytest.mark.parametrize("server", ["127.0.0.1:8001", "ftp://host", "http://"])
def test_what_is_no_address_is_refused(tmp_path: Path, server: str) -> None:
    with pytest.raises(ValueError, match="wanted a URL"):
        attach_program(config(tmp_path, servers=[server]), Settings(home=tmp_path))


def test_a_server_that_is_named_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="http://127.0.0.1:1 is named 2 times"):
        attach_program(config(tmp_path, servers=["http://127.0.0.1:1"] * 2), Settings(home=tmp_path))


def test_a_server_may_see_the_cache_elsewhere_and_has_a_memory_of_its_own(tmp_path: Path) -> None:
    here = AttachConfig.model_validate(config(tmp_path))
    there = AttachConfig.model_validate(config(tmp_path, server="http://other", server_cache="/mnt/drafts"))
    directory = here.settings.cache / "draft" / "2-ab"
    assert (here.published(directory), there.published(directory)) == (str(directory), "/mnt/drafts/draft/2-ab")
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
    journal, one = QueryLog(querylog), {"drafting": "head", "drafted": [3] * 20, "speculating": True}
    for at, (domain, draft, accepted) in enumerate([("code", 2, 0), ("chat", 2, 2), ("chat", 1, 0)] * 40):
        said = one | {"draft_version": draft, "accepted": [accepted] * 20}
        journal.append([row(f"r{at}", domain).model_copy(update=said)])

    async def until_told() -> None:
        detecting, until = asyncio.create_task(detect_drift(attached)), time.monotonic() + WAIT_S
        while "code" not in TriggerFile(querylog).state().domains:
            assert time.monotonic() < until and not detecting.done()
            await asyncio.sleep(0.05)
        detecting.cancel()

    asyncio.run(until_told())
    told = TriggerFile(querylog).state().domains
    assert isinstance(fallen := told["code"], Fallen)
    assert (fallen.fall.draft, fallen.fall.promised, fallen.fall.served) == (champion.number, 2.5, 1.0)
    assert not isinstance(told.get("chat"), Fallen)
