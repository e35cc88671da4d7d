"""What is hashed once: files of many GB are sparse here, and what was read is the kernel's count."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from infra.artifacts import (
    REMEMBERED_BYTES,
    FileEntry,
    Manifest,
    check_manifest,
    file_sha256,
    open_artifact,
    publish,
    write_manifest,
)
from infra.settings import load_settings
from models.targets import describe

GIB, MIB = 1 << 30, 1 << 20


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REDRAFT_HOME", str(tmp_path / "home"))


def age(path: Path, seconds: float) -> None:
    """Let a file have been written earlier, as one that took minutes to write was."""
    changed_s = path.stat().st_mtime - seconds
    os.utime(path, (changed_s, changed_s))


@contextmanager
def reading_at_most(num_bytes: int) -> Iterator[None]:
    def read() -> int:
        return int(Path("/proc/self/io").read_text().split()[1])

    before = read()
    yield
    assert read() - before < num_bytes


def remember(path: Path, sha256: str) -> None:
    """Write what hashing a file leaves behind, of one that takes minutes to hash."""
    stat, folder = path.stat(), load_settings().digests
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{stat.st_dev:x}-{stat.st_ino:x}").write_text(f"{stat.st_size} {stat.st_mtime_ns} {sha256}")


def test_a_target_of_140_gb_that_was_hashed_once_is_opened_and_described_without_reading_it(
    tmp_path: Path, tiny_target: Path
) -> None:
    target = tmp_path / "target"
    target.mkdir()
    for file in tiny_target.iterdir():
        if file.suffix != ".safetensors" and file.is_file():
            (target / file.name).write_bytes(file.read_bytes())
    weights = target / "model.safetensors"
    with weights.open("wb") as file:
        file.truncate(140 * GIB)
    age(weights, 60)
    remember(weights, "ab" * 32)
    entries = {
        path.name: FileEntry(sha256=file_sha256(path, remembered=True), bytes=path.stat().st_size)
        for path in target.iterdir()
        if path.name != "manifest.json"
    }
    (target / "manifest.json").write_text(Manifest(files=entries).model_dump_json())
    with reading_at_most(MIB):
        artifact = publish(target, "target")
        card = describe(open_artifact(artifact))
    assert artifact.sha256 == Manifest(files=entries).digest()
    assert card.name == describe(tiny_target).name
    weights.write_bytes(b"")
    with pytest.raises(ValueError, match=r"model\.safetensors has 0 bytes, the manifest says 150323855360"):
        open_artifact(artifact)


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """A directory with a large file that was written a while ago and hashed since."""
    directory = tmp_path / "large"
    directory.mkdir()
    (directory / "weights.bin").write_bytes(bytes(MIB))
    age(directory / "weights.bin", 60)
    write_manifest(directory)
    return directory


def test_a_large_file_is_read_once_and_under_another_name_neither(large: Path, tmp_path: Path) -> None:
    with reading_at_most(MIB // 2):
        artifact = publish(large, "target")
        moved = large.rename(tmp_path / "moved")
        assert publish(moved, "target").sha256 == artifact.sha256
    linked = tmp_path / "linked.bin"
    linked.hardlink_to(moved / "weights.bin")
    with reading_at_most(MIB // 2):
        file_sha256(linked, remembered=True)


def test_a_file_with_another_size_time_or_inode_is_read_again_and_refused(large: Path) -> None:
    artifact, weights = publish(large, "target"), large / "weights.bin"
    time_ns = weights.stat().st_mtime_ns
    weights.write_bytes(b"1" * MIB)  # another time
    with pytest.raises(ValueError, match=r"weights\.bin has sha256"):
        open_artifact(artifact)
    weights.rename(large.parent / "old")
    weights.write_bytes(b"2" * MIB)
    os.utime(weights, ns=(time_ns, time_ns))  # another inode
    with pytest.raises(ValueError, match=r"weights\.bin has sha256"):
        open_artifact(artifact)
    weights.write_bytes(b"2" * (MIB + 1))
    with pytest.raises(ValueError, match=r"weights\.bin has 1048577 bytes"):
        open_artifact(artifact)


def test_a_file_that_was_just_written_is_not_remembered(tmp_path: Path) -> None:
    file = tmp_path / "fresh.bin"
    file.write_bytes(bytes(REMEMBERED_BYTES))
    later_ns = file.stat().st_mtime_ns + 3600 * 10**9  # by a server's clock, which is ahead
    os.utime(file, ns=(later_ns, later_ns))
    before = file_sha256(file, remembered=True)
    file.write_bytes(b"1" * REMEMBERED_BYTES)
    os.utime(file, ns=(later_ns, later_ns))
    assert file_sha256(file, remembered=True) != before


def test_who_asks_for_the_bytes_gets_them_read(large: Path) -> None:
    weights = large / "weights.bin"
    time_ns = weights.stat().st_mtime_ns
    weights.write_bytes(b"1" * MIB)
    os.utime(weights, ns=(time_ns, time_ns))  # whoever did this meant it
    check_manifest(large, remembered=True)
    with pytest.raises(ValueError, match=r"weights\.bin has sha256"):
        check_manifest(large)


def test_weights_that_are_younger_than_their_manifest_are_described_as_they_are(
    tiny_target: Path, tmp_path: Path
) -> None:
    target = tmp_path / "target"
    target.mkdir()
    for file in tiny_target.iterdir():
        if file.is_file():
            (target / file.name).write_bytes(file.read_bytes())
    write_manifest(target)
    weights = target / "model.safetensors"
    age(weights, 60)
    before = describe(target)
    assert before.sha256 == describe(tiny_target).sha256
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    os.utime(weights, (2**32, 2**32))
    assert describe(target).sha256 != before.sha256
