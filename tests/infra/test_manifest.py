import hashlib
import json
from pathlib import Path

import pytest

from infra.manifest import check_manifest, file_sha256, write_manifest


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    directory = tmp_path / "checkpoint"
    (directory / "nested").mkdir(parents=True)
    (directory / "weights.bin").write_bytes(b"abc")
    (directory / "nested" / "empty.txt").write_bytes(b"")
    write_manifest(directory)
    return directory


def test_the_manifest_holds_the_known_sha256_and_size_of_each_file(checkpoint: Path) -> None:
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    abc = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    files = {"nested/empty.txt": {"bytes": 0, "sha256": empty}, "weights.bin": {"bytes": 3, "sha256": abc}}
    assert manifest == {"format_version": 1, "files": files}
    canonical = json.dumps(files, sort_keys=True, separators=(",", ":")).encode()
    assert check_manifest(checkpoint) == hashlib.sha256(canonical).hexdigest()
    assert file_sha256(checkpoint / "weights.bin") == abc


def test_the_digest_depends_on_content_and_not_on_place_or_repetition(checkpoint: Path, tmp_path: Path) -> None:
    digest = write_manifest(checkpoint)
    moved = checkpoint.rename(tmp_path / "elsewhere")
    assert check_manifest(moved) == write_manifest(moved) == digest
    (moved / "weights.bin").write_bytes(b"abd")
    assert write_manifest(moved) != digest


def test_each_fault_is_refused_with_the_name_of_the_file(checkpoint: Path) -> None:
    weights = checkpoint / "weights.bin"
    weights.write_bytes(b"abd")
    with pytest.raises(ValueError, match=r"weights\.bin has sha256"):
        check_manifest(checkpoint)
    weights.write_bytes(b"ab")
    with pytest.raises(ValueError, match=r"weights\.bin has 2 bytes, the manifest says 3"):
        check_manifest(checkpoint)
    weights.unlink()
    with pytest.raises(ValueError, match=r"weights\.bin is missing"):
        check_manifest(checkpoint)
    weights.write_bytes(b"abc")
    (checkpoint / "extra.py").write_text("")
    with pytest.raises(ValueError, match=r"extra\.py is extra"):
        check_manifest(checkpoint)


def test_a_directory_without_a_manifest_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no manifest\.json"):
        check_manifest(tmp_path)
    with pytest.raises(ValueError, match="is not a directory"):
        write_manifest(tmp_path / "absent")


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        ('{"format_version": 2, "files": {}}', "format_version"),
        ('{"format_version": 1}', "files"),
        ('{"format_version": 1, "files": {"a": {"sha256": "0", "bytes": 1}}}', "files.a.sha256"),
        ('{"format_version": 1, "fi', "Invalid JSON"),
    ],
)
def test_an_unreadable_manifest_is_refused_with_the_place_of_the_fault(
    tmp_path: Path, content: str, fault: str
) -> None:
    (tmp_path / "manifest.json").write_text(content)
    with pytest.raises(ValueError, match=f"manifest.json is not a manifest of format version 1.*{fault}"):
        check_manifest(tmp_path)


def test_a_symbolic_link_is_refused_when_writing_and_when_checking(checkpoint: Path) -> None:
    (checkpoint / "link").symlink_to("/etc/hostname")
    for function in (write_manifest, check_manifest):
        with pytest.raises(ValueError, match="link is neither a regular file nor a directory"):
            function(checkpoint)
