"""Which past drafts could still be swapped in, by real files in a real registry."""

import shutil
from pathlib import Path
from urllib.parse import urlparse

import pytest

from infra.artifacts import publish
from infra.manifest import write_manifest
from infra.registry import Registry, open_registry
from infra.versions import Pair, Version
from tasks.find_past import fitting
from tests.conftest import make_draft
from tests.tags import draft_tags


@pytest.fixture
def registry(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Registry:
    (tmp_path / "home").mkdir()
    shutil.copy(store, tmp_path / "home")
    monkeypatch.setenv("REDRAFT_HOME", str(tmp_path / "home"))
    return open_registry()


@pytest.mark.slow
def test_drafts_whose_files_are_gone_or_of_another_shape_are_passed_over(
    registry: Registry, tiny_target: Path, tmp_path: Path
) -> None:
    shutil.copytree(tiny_target, tmp_path / "target")
    write_manifest(tmp_path / "target")

    def register(vocab_size: int = 64) -> Version:
        number = len(registry.versions("draft")) + 1
        directory = tmp_path / f"draft {number}"
        directory.mkdir()
        return registry.register("draft", make_draft(tiny_target, directory, number, vocab_size), draft_tags())

    champion, deleted, wider, damaged, fits = register(), register(), register(128), register(), register()
    for version, spoil in (
        (deleted, shutil.rmtree),
        (damaged, lambda folder: (folder / "config.json").write_text("{}")),
    ):
        uri = registry.store.client.get_model_version_download_uri("draft", str(version.number))
        spoil(Path(urlparse(uri).path))
    pair = Pair(
        target=registry.register("target", tmp_path / "target", draft_tags()),
        draft=champion,
        target_files=publish(tmp_path / "target", "target"),
        draft_files=publish(registry.download(champion, tmp_path / "cache"), "draft"),
    )
    found = dict(fitting(registry, pair, [deleted, wider, damaged, fits]))
    assert found.keys() == {fits.number}
    assert found[fits.number].sha256 == fits.sha256
