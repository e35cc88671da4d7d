"""Artifacts in an object store, moto's; what two machines share is the bucket alone."""

import json
import re
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from infra.artifacts import Artifact, forget_others, get, open_artifact, publish, put, staged, stored
from infra.processes import free_port
from infra.settings import load_settings
from infra.store import ObjectMissing, ObjectStore, ObjectsUnavailable
from tests.object_store import Bucket

Machine = Callable[[str], None]


@pytest.fixture
def machine(bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """What puts the process on a machine of that name, which has a disk of its own."""

    def enter(name: str) -> None:
        monkeypatch.setenv("REDRAFT_HOME", str(tmp_path / name))
        monkeypatch.setenv("REDRAFT_ARTIFACTS", f"{bucket.address}/")

    enter("worker")
    return enter


def make(name: str = "one", content: bytes = b"weights") -> Path:
    final = load_settings().local_artifacts / "draft" / name
    with staged(final) as directory:
        (directory / "nested").mkdir()
        (directory / "nested" / "model.safetensors").write_bytes(content)
        (directory / "config.json").write_text("{}")
    return final


def test_what_one_machine_stored_another_opens_and_keeps(machine: Machine, bucket: Bucket) -> None:
    own = publish(make(), "draft")
    shared = stored(own)
    assert shared.uri == f"{bucket.address}/draft/{own.sha256}"
    assert (shared.sha256, shared.kind) == (own.sha256, own.kind)
    assert stored(shared) == shared
    machine("service")
    there = open_artifact(Artifact.model_validate_json(shared.model_dump_json()))
    assert there.is_relative_to(load_settings().cache)
    assert (there / "nested" / "model.safetensors").read_bytes() == b"weights"
    with pytest.raises(ValueError, match="is no folder of this machine"):
        _ = shared.path
    bucket.empty()
    assert open_artifact(shared) == there  # it is in the cache


@pytest.mark.slow
def test_a_directory_is_visible_only_when_its_manifest_is_there(machine: Machine, bucket: Bucket) -> None:
    shared = stored(publish(make(), "draft"))
    ObjectStore()._files.rm_file(f"{shared.uri}/manifest.json")  # as while it is written
    machine("service")
    with pytest.raises(ObjectMissing, match="manifest.json: it is not there"):
        open_artifact(shared)
    machine("worker")
    assert stored(publish(make(), "draft")) == shared
    machine("service")
    open_artifact(shared)


def test_a_directory_that_could_not_be_written_as_a_whole_stays_invisible(machine: Machine, bucket: Bucket) -> None:
    directory = make()
    own = publish(directory, "draft")
    (directory / "nested" / "model.safetensors").unlink()
    with pytest.raises(ObjectsUnavailable, match="nested/model.safetensors"):
        put(directory, "draft", bucket.address)
    assert bucket.names() == [f"draft/{own.sha256}/config.json"]


def test_files_that_are_not_those_of_the_reference_are_refused_while_they_come(machine: Machine) -> None:
    shared = stored(publish(make(), "draft"))
    ObjectStore()._files.pipe_file(f"{shared.uri}/nested/model.safetensors", b"weighst")
    machine("service")
    with pytest.raises(ValueError, match=r"nested/model\.safetensors has sha256 .*, the manifest says"):
        open_artifact(shared)
    ObjectStore()._files.pipe_file(f"{shared.uri}/nested/model.safetensors", b"weights" * 1000)
    with pytest.raises(ValueError, match=r"nested/model\.safetensors has more than the 7 bytes of the manifest"):
        open_artifact(shared)
    assert not [*(load_settings().cache / "artifact").glob("[!.]*")]
    other = shared.model_copy(update={"sha256": "0" * 64})
    with pytest.raises(ValueError, match=f"has digest {shared.sha256}, the reference says {'0' * 64}"):
        open_artifact(other)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["../escaped", "/etc/escaped", "a/../../escaped", "manifest.json", ""])
def test_a_manifest_that_names_a_file_elsewhere_is_refused(machine, bucket, tmp_path, name) -> None:
    address, entry = f"{bucket.address}/draft/hostile", {"sha256": "0" * 64, "bytes": 1}
    content = json.dumps({"format_version": 1, "files": {name: entry}})
    ObjectStore()._files.pipe_file(f"{address}/manifest.json", content.encode())
    with pytest.raises(ValueError, match="is not the path of a file in the directory"):
        get(address, "0" * 64, tmp_path)
    assert not (tmp_path / "escaped").exists()


@pytest.mark.slow
def test_the_same_files_are_written_once_and_go_when_they_are_forgotten(machine: Machine, bucket: Bucket) -> None:
    one, same, other = (publish(make(*of), "state") for of in (("1", b"a"), ("2", b"a"), ("3", b"b")))
    assert stored(one).uri == stored(same).uri
    kept = stored(other)
    assert len(bucket.names()) == 6
    forget_others("state", {kept.uri})
    assert {name.split("/")[1] for name in bucket.names()} == {kept.sha256}
    forget_others("draft", ())


def test_without_an_object_store_a_reference_stays_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REDRAFT_HOME", str(tmp_path))
    own = publish(make(), "draft")
    assert stored(own) == own
    forget_others("draft", ())
    assert open_artifact(own) == own.path


@pytest.mark.parametrize("address", ["s3://", "s3://UPPER/x", "s3://b/..//x?y", "s3://bucket/a b"])
def test_an_address_that_is_none_is_refused_by_name(address: str) -> None:
    with pytest.raises(ValueError, match="REDRAFT_ARTIFACTS: .* is neither a folder nor s3://bucket/prefix"):
        load_settings({"REDRAFT_ARTIFACTS": address})


def test_a_bucket_or_a_store_that_is_not_there_is_noticed_at_once(machine: Machine, monkeypatch) -> None:
    with pytest.raises(ObjectsUnavailable, match="writing s3://nobodys-bucket/draft/.*: it is not there"):
        put(make(), "draft", "s3://nobodys-bucket")
    shared = stored(publish(make(), "draft"))
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{free_port('127.0.0.1')}")
    machine("service")
    with pytest.raises(ObjectsUnavailable, match=f"reading {re.escape(shared.uri)}/manifest.json: Could not connect"):
        open_artifact(shared)


@pytest.mark.slow
def test_a_store_that_takes_connections_and_answers_nothing_is_given_up(
    machine: Machine, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared, failed = stored(publish(make(), "draft")), list[BaseException]()
    machine("service")

    def ask() -> None:
        try:
            open_artifact(shared)
        except ObjectsUnavailable as error:
            failed.append(error)

    asking = threading.Thread(target=ask, daemon=True)
    with monkeypatch.context() as patch, bucket.silent():
        patch.setattr("infra.store.READ_S", 1)
        asking.start()
        asking.join(60)  # the store would be waited for as long as it is stopped
        assert failed
    assert open_artifact(shared).is_dir()
