import json
from collections.abc import Callable
from pathlib import Path

import pytest

from infra.artifacts import staged
from infra.manifest import check_manifest
from infra.processes import free_port
from infra.registry import (
    CHAMPION,
    LINEAGE_TAGS,
    ForeignVersion,
    Registry,
    Version,
    is_quarantined,
)
from infra.store import StoreUnavailable

LINEAGE = dict.fromkeys(LINEAGE_TAGS, "")


@pytest.fixture
def registry(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Registry:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mlflow.db").write_bytes(store.read_bytes())
    return Registry(f"sqlite:///{tmp_path}/mlflow.db", tmp_path / "artifacts")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Callable[[str], Path]:
    def make(content: str) -> Path:
        final = tmp_path / "checkpoints" / content
        with staged(final) as directory:
            (directory / "model.safetensors").write_text(content)
            (directory / "nested").mkdir()
            (directory / "nested" / "config.json").write_text("{}")
        return final

    return make


def register_drafts(registry: Registry, checkpoint: Callable[[str], Path], count: int) -> list[Version]:
    return [registry.register("draft", checkpoint(f"draft {n}"), LINEAGE) for n in range(1, count + 1)]


def champion_number(registry: Registry) -> int | None:
    champion = registry.champion("draft")
    return None if champion is None else champion.number


def test_a_registered_version_is_listed_with_its_lineage_and_digest(
    registry: Registry, checkpoint: Callable[[str], Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert registry.champion("draft") is None
    assert registry.versions("draft") == []
    gate = json.dumps({"chat": 0.25})
    version = registry.register("draft", checkpoint("one"), {**LINEAGE, "gate": gate}, {"tau": 2.5})
    assert (version.kind, version.number, version.sha256) == ("draft", 1, check_manifest(checkpoint("one")))
    assert (version.tags["gate"], version.tags["parent"]) == (gate, "")
    assert registry.get("draft", 1) == version
    second = registry.register("draft", checkpoint("two"), LINEAGE)
    assert [each.number for each in registry.versions("draft")] == [2, 1]
    assert second.created_ms >= version.created_ms
    assert registry.versions("target") == []
    captured = capfd.readouterr()
    assert captured.out + captured.err == ""
    assert sorted(path.name for path in tmp_path.iterdir() if "mlflow.db" not in path.name) == [
        "artifacts",
        "checkpoints",
    ]


def test_a_draft_without_its_lineage_is_refused_by_name(registry: Registry, checkpoint: Callable[[str], Path]) -> None:
    partial = {name: "" for name in LINEAGE_TAGS if name not in ("parent", "gate")}
    with pytest.raises(ValueError, match="needs the tags parent, gate"):
        registry.register("draft", checkpoint("one"), partial)
    with pytest.raises(ValueError, match="sets the tags sha256 itself"):
        registry.register("target", checkpoint("one"), {"sha256": "0"})
    assert registry.register("target", checkpoint("one"), {}).number == 1


def test_what_is_not_sound_is_not_registered(registry: Registry, checkpoint: Callable[[str], Path]) -> None:
    directory = checkpoint("one")
    with pytest.raises(ValueError, match="metric tau is nan"):
        registry.register("target", directory, {}, {"tau": float("nan")})
    (directory / "model.safetensors").write_text("eno")
    with pytest.raises(ValueError, match=r"model\.safetensors has sha256"):
        registry.register("target", directory, {})
    assert registry.versions("target") == []


def test_promoting_remembers_the_former_champion_and_repeating_it_changes_nothing(
    registry: Registry, checkpoint: Callable[[str], Path]
) -> None:
    register_drafts(registry, checkpoint, 2)
    for number, previous in ((1, ""), (2, "1"), (2, "1")):
        registry.promote("draft", number)
        champion = registry.champion("draft")
        assert champion is not None
        assert (champion.number, champion.tags["previous"]) == (number, previous)
    with pytest.raises(ValueError, match="looking up draft 9"):
        registry.promote("draft", 9)


def test_reverting_goes_back_past_quarantined_versions(registry: Registry, checkpoint: Callable[[str], Path]) -> None:
    for version in register_drafts(registry, checkpoint, 3):
        registry.promote("draft", version.number)
    assert registry.revert("draft", 2, "found bad later") == registry.champion("draft")
    assert champion_number(registry) == 3
    back = registry.revert("draft", 3, "acceptance fell")
    assert back is not None
    assert back.number == champion_number(registry) == 1
    reverted = registry.get("draft", 3)
    assert is_quarantined(reverted)
    registry.quarantine("draft", 3, "another reason")
    assert registry.get("draft", 3).tags["quarantined"] == "acceptance fell"
    with pytest.raises(ValueError, match="draft 3 is quarantined: acceptance fell"):
        registry.promote("draft", 3)
    with pytest.raises(ValueError, match="needs a reason"):
        registry.revert("draft", 1, "")


def test_reverting_the_only_version_leaves_no_champion(registry: Registry, checkpoint: Callable[[str], Path]) -> None:
    register_drafts(registry, checkpoint, 1)
    registry.promote("draft", 1)
    assert registry.revert("draft", 1, "bad") is None
    assert registry.champion("draft") is None
    assert registry.revert("draft", 1, "bad") is None


def test_reverting_ends_when_two_versions_name_each_other(
    registry: Registry, checkpoint: Callable[[str], Path]
) -> None:
    register_drafts(registry, checkpoint, 2)
    for number in (1, 2, 1):
        registry.promote("draft", number)
    assert registry.revert("draft", 1, "bad") == registry.get("draft", 2)
    assert registry.revert("draft", 2, "bad") is None


def test_a_download_is_the_registered_bytes_and_later_comes_from_the_cache(
    registry: Registry, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    (version,) = register_drafts(registry, checkpoint, 1)
    path = registry.download(version, tmp_path / "cache")
    assert path == tmp_path / "cache" / "draft" / f"1-{version.sha256[:12]}"
    assert check_manifest(path) == version.sha256
    assert (path / "nested" / "config.json").read_text() == "{}"
    offline = Registry(f"http://127.0.0.1:{free_port()}", tmp_path / "artifacts")
    assert offline.download(version, tmp_path / "cache") == path
    (path / "model.safetensors").write_text("DRAFT 1")
    assert registry.download(version, tmp_path / "cache") == path
    assert (path / "model.safetensors").read_text() == "draft 1"


def test_a_version_whose_stored_files_changed_is_refused_and_not_cached(
    registry: Registry, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    first, second = register_drafts(registry, checkpoint, 2)
    stored = sorted((tmp_path / "artifacts").rglob("model.safetensors"))
    swapped = [path.read_text() for path in stored]
    for path, text in zip(stored, reversed(swapped), strict=True):
        path.write_text(text)
    with pytest.raises(ValueError, match=r"model\.safetensors has sha256"):
        registry.download(first, tmp_path / "cache")
    whole = first.model_copy(update={"sha256": "0" * 64, "number": 2})
    for path, text in zip(stored, swapped, strict=True):
        path.write_text(text)
    with pytest.raises(ValueError, match="draft 2 was registered with 0000"):
        registry.download(whole, tmp_path / "cache")
    assert [path for path in (tmp_path / "cache" / "draft").iterdir() if path.is_dir()] == []
    for path in stored:
        path.unlink()
    with pytest.raises(ValueError, match=r"model\.safetensors is missing"):
        registry.download(second, tmp_path / "cache")


def test_a_store_that_is_down_is_reported_as_such_within_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    registry = Registry(f"http://127.0.0.1:{free_port()}", tmp_path / "artifacts")
    with pytest.raises(StoreUnavailable, match="looking up the champion of draft"):
        registry.champion("draft")


def test_an_alias_that_was_set_to_something_foreign_is_refused_and_put_right_by_promoting(
    registry: Registry, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    from mlflow import MlflowClient  # not at the top: it reads variables that the registry sets first

    register_drafts(registry, checkpoint, 1)
    registry.promote("draft", 1)
    by_hand = MlflowClient(registry.store.uri, registry.store.uri)
    by_hand.create_model_version("draft", source=tmp_path.as_uri())
    by_hand.set_registered_model_alias("draft", CHAMPION, "2")
    with pytest.raises(ForeignVersion, match="draft 2 was not registered by redraft"):
        registry.champion("draft")
    assert [version.number for version in registry.versions("draft")] == [1]
    registry.promote("draft", 1)
    assert champion_number(registry) == 1


def test_reports_and_a_description_are_there_as_soon_as_the_version_is(
    registry: Registry, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    (tmp_path / "page.md").write_text("τ rose")
    version = registry.register("draft", checkpoint("one"), LINEAGE, {}, [tmp_path / "page.md"], "it may serve")
    assert registry.attached(version, "page.md") == "τ rose"
    assert registry.attached(version, "other.md") is None
    described = registry.store.client.get_model_version("draft", "1")
    assert described.description == f"it may serve\n\nruns:/{described.run_id}/page.md"
    plain = registry.register("draft", checkpoint("two"), LINEAGE)
    assert registry.attached(plain, "page.md") is None
    assert registry.store.client.get_model_version("draft", "2").description == ""
