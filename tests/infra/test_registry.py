from pathlib import Path

import pytest

from infra.artifacts import check_manifest
from infra.champions import Outdated
from infra.database import Database
from infra.processes import free_port, hold_port
from infra.registry import Registry
from infra.store import ObjectStore, StoreUnavailable
from infra.versions import ForeignVersion, is_quarantined
from tests.infra.conftest import champion_number
from tests.tags import draft_tags

LINEAGE = draft_tags()


def registry_at(uri: str, home: Path) -> Registry:
    return Registry(uri, home / "artifacts", Database(home / "queries.db"))


@pytest.fixture
def registry(stocked: Path, tmp_path: Path) -> Registry:
    """A registry of a target and three drafts."""
    (tmp_path / "mlflow.db").write_bytes(stocked.read_bytes())
    return registry_at(f"sqlite:///{tmp_path}/mlflow.db", tmp_path)


@pytest.fixture
def fresh(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Registry:
    """A registry of nothing."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mlflow.db").write_bytes(store.read_bytes())
    return registry_at(f"sqlite:///{tmp_path}/mlflow.db", tmp_path)


def test_a_registered_version_is_listed_with_its_lineage_and_digest(fresh, checkpoint, tmp_path, capfd) -> None:
    assert (fresh.champion("draft"), fresh.versions("draft")) == (None, [])
    version = fresh.register("draft", checkpoint("one"), {**LINEAGE, "gate": "refused"}, {"tau": 2.5})
    assert (version.kind, version.number, version.sha256) == ("draft", 1, check_manifest(checkpoint("one")))
    assert not {"", "{}"} & {*version.tags.values()}
    assert (version.lineage.gate, version.lineage.parent, version.lineage.tau) == ("refused", None, {})
    assert fresh.get("draft", 1) == version
    second = fresh.register("draft", checkpoint("two"), LINEAGE)
    assert [each.number for each in fresh.versions("draft")] == [2, 1]
    assert second.created_ms >= version.created_ms
    assert fresh.versions("target") == []
    captured = capfd.readouterr()
    assert captured.out + captured.err == ""
    assert {path.name for path in tmp_path.iterdir() if ".db" not in path.name} == {"artifacts", "checkpoints"}


def test_a_draft_without_its_lineage_is_refused_by_name(fresh, checkpoint) -> None:
    partial = {name: value for name, value in LINEAGE.items() if name not in ("parent", "gate")}
    with pytest.raises(ValueError, match="tag parent is missing; tag gate is missing"):
        fresh.register("draft", checkpoint("one"), partial)
    with pytest.raises(ValueError, match="sets the tags sha256 itself"):
        fresh.register("target", checkpoint("one"), {"sha256": "0"})
    assert fresh.register("target", checkpoint("one"), {}).number == 1


def test_what_is_not_sound_is_not_registered(fresh, checkpoint) -> None:
    directory = checkpoint("one")
    with pytest.raises(ValueError, match="metric tau is nan"):
        fresh.register("target", directory, {}, {"tau": float("nan")})
    (directory / "model.safetensors").write_text("eno")
    with pytest.raises(ValueError, match=r"model\.safetensors has sha256"):
        fresh.register("target", directory, {})
    assert fresh.versions("target") == []


def test_promoting_remembers_the_former_champion_and_repeating_it_changes_nothing(registry) -> None:
    for number, previous in ((1, "none"), (2, "1"), (2, "1")):
        registry.promote("draft", number)
        assert (champion_number(registry), registry.get("draft", number).tags["previous"]) == (number, previous)
    with pytest.raises(ValueError, match="the registry has no draft 9"):
        registry.promote("draft", 9)


def test_what_was_gated_against_a_draft_that_is_gone_or_quarantined_is_outdated(registry) -> None:
    with pytest.raises(Outdated, match="draft 1, which is no longer the champion: there is none"):
        registry.promote("draft", 2, expected_champion=1)
    registry.promote("draft", 1)
    registry.quarantine("draft", 1, "another output")
    with pytest.raises(Outdated, match="draft 1, which is quarantined: another output"):
        registry.promote("draft", 2, expected_champion=1)
    assert champion_number(registry) == 1
    registry.promote("draft", 2)
    registry.promote("draft", 2, expected_champion=1)  # promoting the champion changes nothing
    assert champion_number(registry) == 2


def test_reverting_goes_back_past_quarantined_versions(registry, promote) -> None:
    promote(1, 2, 3)
    assert registry.revert("draft", 2, "found bad later") == registry.champion("draft")
    assert champion_number(registry) == 3
    back = registry.revert("draft", 3, "acceptance fell")
    assert back is not None
    assert back.number == champion_number(registry) == 1
    assert is_quarantined(registry.get("draft", 3))
    registry.quarantine("draft", 3, "another reason")
    assert registry.get("draft", 3).tags["quarantined"] == "acceptance fell"
    with pytest.raises(ValueError, match="draft 3 is quarantined: acceptance fell"):
        registry.promote("draft", 3)
    with pytest.raises(ValueError, match="needs a reason"):
        registry.revert("draft", 1, "")


def test_reverting_the_only_version_leaves_no_champion(registry, promote) -> None:
    promote(1)
    for _ in range(2):
        assert registry.revert("draft", 1, "bad") is registry.champion("draft") is None


def test_reverting_ends_when_two_versions_name_each_other(registry, promote) -> None:
    promote(1, 2, 1)
    assert registry.revert("draft", 1, "bad") == registry.get("draft", 2)
    assert registry.revert("draft", 2, "bad") is None


def test_a_download_is_the_registered_bytes_and_later_comes_from_the_cache(registry, tmp_path) -> None:
    version = registry.get("draft", 1)
    path = registry.download(version, tmp_path / "cache")
    assert path == tmp_path / "cache" / "draft" / f"1-{version.sha256[:12]}"
    assert check_manifest(path) == version.sha256
    assert (path / "nested" / "config.json").read_text() == "{}"
    with hold_port("127.0.0.1", free_port()) as unheard:
        offline = registry_at(f"http://127.0.0.1:{unheard.getsockname()[1]}", tmp_path)
        assert offline.download(version, tmp_path / "cache") == path
    (path / "model.safetensors").write_text("DRAFT 1")
    assert registry.download(version, tmp_path / "cache") == path
    assert (path / "model.safetensors").read_text() == "draft 1"


def test_a_version_whose_stored_files_changed_is_refused_and_not_cached(fresh, checkpoint, tmp_path) -> None:
    first, second = (fresh.register("draft", checkpoint(name), LINEAGE) for name in ("draft 1", "draft 2"))
    stored = sorted((tmp_path / "artifacts").rglob("model.safetensors"))
    swapped = [path.read_text() for path in stored]
    for path, text in zip(stored, reversed(swapped), strict=True):
        path.write_text(text)
    with pytest.raises(ValueError, match=r"model\.safetensors has sha256"):
        fresh.download(first, tmp_path / "cache")
    for path, text in zip(stored, swapped, strict=True):
        path.write_text(text)
    with pytest.raises(ValueError, match="draft 2 was registered with 0000"):
        fresh.download(first.model_copy(update={"sha256": "0" * 64, "number": 2}), tmp_path / "cache")
    assert [path for path in (tmp_path / "cache" / "draft").iterdir() if path.is_dir()] == []
    for path in stored:
        path.unlink()
    with pytest.raises(ValueError, match=r"model\.safetensors is missing"):
        fresh.download(second, tmp_path / "cache")


def test_a_store_that_is_down_is_reported_as_such_within_seconds(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with hold_port("127.0.0.1", free_port()) as unheard:
        registry = registry_at(f"http://127.0.0.1:{unheard.getsockname()[1]}", tmp_path)
        with pytest.raises(StoreUnavailable, match="looking up the champion of draft"):
            registry.champion("draft")


@pytest.mark.slow
@pytest.mark.parametrize("tag", ["", "A" * 60])
def test_a_version_whose_digest_somebody_overwrote_is_left_alone_and_the_others_go_on(registry, promote, tag) -> None:
    promote(1, 2)
    registry.store.client.set_model_version_tag("draft", "2", "sha256", tag)
    with pytest.raises(ForeignVersion, match=f"draft 2: tag sha256 is {tag!r}, wanted a digest"):
        registry.champion("draft")
    assert [version.number for version in registry.versions("draft")] == [3, 1]
    registry.promote("draft", 1)
    assert champion_number(registry) == 1


@pytest.mark.parametrize(("name", "why"), [("mlflow.db", "file is not a database$"), ("queries.db", r"\.db is torn")])
def test_a_torn_database_is_a_store_that_is_unavailable(registry, promote, tmp_path, name, why) -> None:
    promote(1)
    for file in tmp_path.glob(f"{name}*"):
        file.unlink()
    (tmp_path / name).write_bytes(b"torn" * 4096)
    with pytest.raises(StoreUnavailable, match=f"looking up the champion of draft: .*{why}"):
        registry_at(registry.store.uri, tmp_path).champion("draft")


def test_reports_and_a_description_are_there_as_soon_as_the_version_is(fresh, checkpoint, tmp_path) -> None:
    (tmp_path / "page.md").write_text("τ rose")
    version = fresh.register("draft", checkpoint("one"), LINEAGE, {}, [tmp_path / "page.md"], "it may serve")
    assert fresh.attached(version, "page.md") == "τ rose"
    assert fresh.attached(version, "other.md") is None
    described = fresh.store.client.get_model_version("draft", "1")
    link = f"#/experiments/{fresh.store.experiment_id}/runs/{described.run_id}/artifactPath/page.md"
    assert described.description == f"it may serve\n\n[page.md]({link})"
    plain = fresh.register("draft", checkpoint("two"), LINEAGE)
    assert fresh.attached(plain, "page.md") is None
    assert fresh.store.client.get_model_version("draft", "2").description == ""


def test_a_target_that_stays_in_place_is_not_copied_and_is_refused_when_it_changed(fresh, checkpoint, tmp_path):
    directory = checkpoint("target")
    version = fresh.register("target", directory, {}, in_place=True)
    assert version.address == directory.as_uri()
    assert fresh.get("target", 1) == version
    assert fresh.download(version, tmp_path / "cache") == directory
    assert list(tmp_path.rglob("model.safetensors")) == [directory / "model.safetensors"]
    (directory / "model.safetensors").write_text("tegrat")
    with pytest.raises(ValueError, match=r"model\.safetensors has sha256"):
        fresh.download(version, tmp_path / "cache")


@pytest.mark.slow
def test_versions_in_an_object_store_are_fetched_by_machines_that_share_nothing_else(
    bucket, store, checkpoint, tmp_path, monkeypatch
) -> None:
    (tmp_path / "mlflow.db").write_bytes(store.read_bytes())

    def on(machine: str) -> Registry:
        monkeypatch.setenv("REDRAFT_HOME", str(tmp_path / machine))
        own, rows = tmp_path / machine / "mlflow", Database(tmp_path / "queries.db")
        return Registry(f"sqlite:///{tmp_path}/mlflow.db", own, rows, bucket.address)

    (tmp_path / "page.md").write_text("τ rose")
    trainer = on("trainer")
    version = trainer.register("draft", checkpoint("one"), LINEAGE, {}, [tmp_path / "page.md"])
    target = trainer.register("target", checkpoint("target"), {}, in_place=True)
    trainer.promote("draft", 1)
    assert version.address == f"{bucket.address}/draft/{version.sha256}"
    assert target.address == f"{bucket.address}/target/{target.sha256}"
    assert not any((tmp_path / "trainer" / "mlflow").rglob("*.md"))
    replica = on("replica")
    champion = replica.champion("draft")
    assert champion is not None
    assert (champion.number, champion.address) == (version.number, version.address)
    fetched = replica.download(champion, tmp_path / "replica" / "cache")
    assert check_manifest(fetched) == version.sha256
    assert replica.attached(champion, "page.md") == "τ rose"
    ObjectStore()._files.pipe_file(f"{version.address}/model.safetensors", b"eno")
    assert replica.download(champion, tmp_path / "replica" / "cache") == fetched
    with pytest.raises(ValueError, match=r"model\.safetensors has sha256"):
        replica.download(champion, tmp_path / "elsewhere")
    assert not [*(tmp_path / "elsewhere" / "draft").glob("[!.]*")]


def test_targets_that_share_an_mlflow_have_versions_and_champions_of_their_own(store, tmp_path, checkpoint) -> None:
    (tmp_path / "mlflow.db").write_bytes(store.read_bytes())
    large, small = (
        Registry(
            f"sqlite:///{tmp_path}/mlflow.db", tmp_path / "files", Database(tmp_path / f"{name}.db"), model_prefix=name
        )
        for name in ("llama-8b", "llama-1b")
    )
    for content in ("one", "two"):
        large.register("draft", checkpoint(content), LINEAGE)
    small.register("draft", checkpoint("three"), LINEAGE)
    large.promote("draft", 2)
    small.promote("draft", 1)
    assert [(champion_number(one), len(one.versions("draft"))) for one in (large, small)] == [(2, 2), (1, 1)]
    assert {one.name for one in large.store.client.search_registered_models()} == {"llama-8b-draft", "llama-1b-draft"}
