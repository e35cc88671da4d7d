"""A folder that others roll out from names the champion, and never half of one."""

import json
from pathlib import Path

import pytest

from infra.artifacts import Artifact
from infra.manifest import file_sha256, write_manifest
from infra.registry import Registry
from models.core.drafting.draft_families import family_named
from models.targets import describe
from tasks.export_draft import POINTER, export_draft, publish_champion
from tests.conftest import make_draft
from tests.models.drafts.tiny import save_tiny
from tests.tags import draft_tags


@pytest.fixture(autouse=True)
def _registered(registry: Registry, target: Artifact, tiny_target: Path, tmp_path: Path) -> None:
    """A target, and two drafts for it."""
    card = describe(tiny_target)
    own = {"target_sha256": card.sha256, "tokenizer_sha256": card.tokenizer_sha256, "vocab_size": str(card.vocab_size)}
    registry.register("target", target.path, own)
    for seed in (0, 1):
        (directory := tmp_path / f"draft {seed}").mkdir()
        make_draft(tiny_target, directory, seed)
        registry.register("draft", directory, draft_tags() | own | {"target_version": "1"})


def named(folder: Path) -> Path:
    """Return the directory that the pointer names, as whoever rolls it out finds it."""
    return folder / json.loads((folder / POINTER).read_text())["directory"]


def test_each_champion_gets_a_directory_and_the_pointer_names_the_present_one(
    registry: Registry, tmp_path: Path
) -> None:
    folder = tmp_path / "published"
    assert publish_champion.fn(folder) is None
    assert not folder.exists()
    registry.promote("draft", 1)
    first = publish_champion.fn(folder, "someone/target")
    assert first is not None and first.digest == registry.get("draft", 1).sha256
    assert json.loads((folder / POINTER).read_text()) == {
        "version": 1,
        "digest": first.digest,
        "directory": first.digest,
    }
    assert (folder / POINTER).stat().st_mode & 0o777 == 0o644
    export_draft.fn(1, tmp_path / "alone", "someone/target")
    sums = {file.name: file_sha256(file) for file in named(folder).iterdir()}
    assert sums == {file.name: file_sha256(file) for file in (tmp_path / "alone").iterdir()}
    registry.promote("draft", 2)
    second = publish_champion.fn(folder)
    assert second is not None and (second.version, named(folder).name) == (2, second.digest)
    assert sums == {file.name: file_sha256(file) for file in (folder / first.directory).iterdir()}
    assert sorted(file.name for file in folder.glob("[!.]*")) == sorted([first.digest, second.digest, POINTER])


def test_what_is_there_is_not_written_again(registry: Registry, tmp_path: Path) -> None:
    registry.promote("draft", 1)
    publish_champion.fn(tmp_path / "published")
    before = {file: file.stat().st_mtime_ns for file in (tmp_path / "published").rglob("[!.]*")}
    publish_champion.fn(tmp_path / "published")
    assert {file: file.stat().st_mtime_ns for file in before} == before and len(before) > 3


def test_a_draft_that_can_not_be_written_leaves_the_pointer_at_the_one_before(
    registry: Registry, tiny_target: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "published"
    registry.promote("draft", 1)
    first = publish_champion.fn(folder)
    assert first is not None
    (other := tmp_path / "other").mkdir()
    save_tiny(family_named("kangaroo"), tiny_target, other)
    write_manifest(other)
    registry.register("draft", other, registry.get("draft", 1).lineage.to_tags())
    registry.promote("draft", 3)
    with pytest.raises(ValueError, match="kangaroo"):
        publish_champion.fn(folder)
    assert named(folder).name == first.digest
    assert sorted(file.name for file in folder.glob("[!.]*")) == sorted([first.digest, POINTER])
