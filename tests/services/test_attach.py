"""What is told before somebody else's server is followed; how it is, `test_redraft_vllm` tries on a real one."""

import json
from pathlib import Path

import pytest

from infra.service_process import start_attachment
from infra.settings import ATTACH_TOKEN, Settings
from services.attach import ServerConfig, main


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
        start_attachment(config(tmp_path, servers=[server]), Settings(home=tmp_path))


def test_a_server_that_is_named_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="http://127.0.0.1:1 is named 2 times"):
        start_attachment(config(tmp_path, servers=["http://127.0.0.1:1"] * 2), Settings(home=tmp_path))


def test_a_server_may_see_the_cache_elsewhere_and_has_a_memory_of_its_own(tmp_path: Path) -> None:
    here, there = (
        ServerConfig.model_validate(config(tmp_path, server=server, server_cache=cache))
        for server, cache in (("http://one", ""), ("http://other", "/mnt/drafts"))
    )
    directory = here.settings.cache / "draft" / "2-ab"
    assert (here.published(directory), there.published(directory)) == (str(directory), "/mnt/drafts/draft/2-ab")
    assert here.memory != there.memory
