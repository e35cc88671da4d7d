"""Which past drafts could still be swapped in, by real files in a real registry."""

import shutil
from pathlib import Path
from urllib.parse import urlparse

import pytest

from infra.artifacts import Artifact, publish
from infra.registry import Registry
from infra.versions import Pair, Version
from tasks.find_challenger import fitting
from tests.conftest import make_draft
from tests.tags import draft_tags


@pytest.mark.slow
def test_drafts_whose_files_are_gone_or_of_another_shape_are_passed_over(
    registry: Registry, target: Artifact, tiny_target: Path, tmp_path: Path
) -> None:
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
        target=registry.register("target", target.path, draft_tags()),
        draft=champion,
        target_files=target,
        draft_files=publish(registry.download(champion, tmp_path / "cache"), "draft"),
    )
    found = dict(fitting(registry, pair, [deleted, wider, damaged, fits]))
    assert found.keys() == {fits.number}
    assert found[fits.number].sha256 == fits.sha256
