"""A draft that is exported: vLLM reads it with its target, and imported again it is the same; and a folder that names
the champion, and never half of one."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file
from typer.testing import CliRunner

from flows.cli import app
from infra.artifacts import Artifact, file_sha256, write_manifest
from infra.registry import Registry
from models.core.drafting.draft_families import adopter_of, family_named
from models.drafts import eagle3
from models.targets import describe
from tasks.export_draft import CARD, POINTER, export_draft, publish_champion
from tests.conftest import make_draft
from tests.models.drafts.tiny import save_tiny
from tests.tags import draft_tags


@pytest.fixture(autouse=True)
def _registered(registry: Registry, target: Artifact, tiny_target: Path, tmp_path: Path) -> None:
    """Target 1 and drafts 1 and 3, EAGLE-3 heads, and 2, of a family that vLLM does not serve."""
    folders = draft, other, later = [tmp_path / name for name in ("draft", "other", "later")]
    for directory in folders:
        directory.mkdir()
    make_draft(tiny_target, draft, seed=0)
    make_draft(tiny_target, later, seed=1)
    save_tiny(family_named("kangaroo"), tiny_target, other)
    write_manifest(other)
    card = describe(tiny_target)
    own = {"target_sha256": card.sha256, "tokenizer_sha256": card.tokenizer_sha256, "vocab_size": str(card.vocab_size)}
    registry.register("target", target.path, own)
    for directory in folders:
        registry.register("draft", directory, draft_tags() | own | {"target_version": "1", "tau": '{"chat": 1.5}'})


def test_it_has_what_vllm_asks_of_a_head_that_names_its_target(tmp_path: Path) -> None:
    assert export_draft.fn(1, tmp_path / "out", target="someone/target", licence="mit") == "someone/target"
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["speculators_config"]["verifier"]["name_or_path"] == "someone/target"
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 3
    assert (config["speculators_model_type"], config["norm_before_residual"]) == ("eagle3", False)
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    offsets, mask = tensors["d2t"], tensors["t2d"]
    assert [index + int(offset) for index, offset in enumerate(offsets)] == mask.nonzero()[:, 0].tolist()
    card = (tmp_path / "out" / CARD).read_text()
    assert 'base_model: "someone/target"' in card
    assert 'license: "mit"' in card
    assert "| chat | 1.500 |" in card


@pytest.mark.usefixtures("own_environment")
def test_the_command_names_a_folder_as_a_shell_takes_it(tmp_path: Path) -> None:
    told = CliRunner().invoke(app, ["export-draft", "1", str(tmp_path / "my draft")])
    assert told.output.splitlines()[-1] == f"serve it: vllm serve '{tmp_path}/my draft'"


def test_imported_again_it_is_the_same_file(tiny_target: Path, tmp_path: Path) -> None:
    export_draft.fn(1, tmp_path / "out")
    again = tmp_path / "again"
    again.mkdir()
    assert adopter_of(tmp_path / "out") is eagle3
    eagle3.save(eagle3.adopt(tmp_path / "out", tiny_target), again)
    for name in ("model.safetensors", "config.json"):
        assert file_sha256(again / name) == file_sha256(tmp_path / "draft" / name), name


def test_what_can_not_be_exported_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="of family kangaroo"):
        export_draft.fn(2, tmp_path / "out")
    with pytest.raises(ValueError, match="draft 9"):
        export_draft.fn(9, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    (tmp_path / "there").mkdir()
    with pytest.raises(ValueError, match="there exists"):
        export_draft.fn(1, tmp_path / "there")


def published(folder: Path) -> tuple[dict[str, object], list[str], dict[str, str]]:
    """Return what the pointer says, all that is to be seen beside it, and the sums of the directory that it names."""
    pointer = json.loads((folder / POINTER).read_text())
    return pointer, sorted(file.name for file in folder.glob("[!.]*")), sums(folder / pointer["directory"])


def sums(folder: Path) -> dict[str, str]:
    return {file.name: file_sha256(file) for file in folder.iterdir()}


@pytest.mark.slow
def test_each_champion_gets_a_directory_and_the_pointer_names_the_present_one(
    registry: Registry, tmp_path: Path
) -> None:
    folder = tmp_path / "published"
    assert publish_champion.fn(folder) is None
    assert not folder.exists()
    registry.promote("draft", 1)
    first = publish_champion.fn(folder, "someone/target")
    digest = registry.get("draft", 1).sha256
    export_draft.fn(1, tmp_path / "alone", "someone/target")
    alone = sums(tmp_path / "alone")
    told = {"version": 1, "digest": digest, "directory": digest}
    assert published(folder) == (told, sorted([digest, POINTER]), alone)
    assert (folder / POINTER).stat().st_mode & 0o777 == 0o644
    registry.promote("draft", 3)
    second = publish_champion.fn(folder)
    assert first is not None and second is not None and (second.version, second.directory) == (3, second.digest)
    pointer, names, _ = published(folder)
    assert (pointer["directory"], names) == (second.digest, sorted([first.digest, second.digest, POINTER]))
    assert sums(folder / first.directory) == alone


def test_what_is_there_is_not_written_again_and_what_can_not_be_written_leaves_the_pointer_alone(
    registry: Registry, tmp_path: Path
) -> None:
    folder = tmp_path / "published"
    registry.promote("draft", 1)
    publish_champion.fn(folder)
    before = {file: file.stat().st_mtime_ns for file in folder.rglob("[!.]*")}
    publish_champion.fn(folder)
    registry.promote("draft", 2)
    with pytest.raises(ValueError, match="kangaroo"):
        publish_champion.fn(folder)
    assert {file: file.stat().st_mtime_ns for file in folder.rglob("[!.]*")} == before and len(before) > 3


@pytest.mark.engine
def test_vllm_takes_it_with_its_target_and_nothing_else_said(tmp_path: Path) -> None:
    from vllm import AsyncEngineArgs

    target = export_draft.fn(1, tmp_path / "out")
    config = AsyncEngineArgs(model=str(tmp_path / "out"), max_model_len=128).create_engine_config()
    assert config.model_config.model == target
    assert config.speculative_config.model == str(tmp_path / "out")
    assert (config.speculative_config.method, config.speculative_config.num_speculative_tokens) == ("eagle3", 3)
