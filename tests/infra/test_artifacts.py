"""Directories of files with their hashes: files of many GB are sparse here, and what was read is the kernel's count."""

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from infra import artifacts
from infra.artifacts import (
    Artifact,
    check_manifest,
    fetched,
    file_sha256,
    hold,
    open_artifact,
    publish,
    release,
    remove_unheld,
    staged,
    write_manifest,
)
from infra.files import sweep_staging
from infra.settings import load_settings
from models.targets import describe
from tests.infra.rows import running_python

GIB, MIB = 1 << 30, 1 << 20
KIB = 1 << 10


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REDRAFT_HOME", str(tmp_path / "home"))


def make(final: Path, content: str) -> Path:
    with staged(final) as directory:
        (directory / "a.txt").write_text(content)
    return final


def test_a_staged_directory_appears_whole_with_a_manifest(tmp_path: Path) -> None:
    final = tmp_path / "parents" / "final"
    with staged(final) as directory:
        (directory / "a.txt").write_text("new")
        assert not final.exists()
    assert (final / "a.txt").read_text() == "new"
    check_manifest(final)
    assert [path.name for path in final.parent.iterdir()] == ["final"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_exception_leaves_the_old_directory_and_nothing_else(tmp_path: Path, error: type[BaseException]) -> None:
    final = make(tmp_path / "final", "old")
    with pytest.raises(error), staged(final) as directory:
        (directory / "a.txt").write_text("new")
        raise error
    assert (final / "a.txt").read_text() == "old"
    assert list(tmp_path.iterdir()) == [final]


def test_an_existing_directory_is_replaced(tmp_path: Path) -> None:
    final = make(tmp_path / "final", "old")
    with staged(final) as directory:
        (directory / "new.txt").write_text("new")
    assert sorted(path.name for path in final.iterdir()) == ["manifest.json", "new.txt"]
    assert list(tmp_path.iterdir()) == [final]


def test_what_a_killed_process_left_is_swept_and_living_processes_are_left_alone(tmp_path) -> None:
    script = (
        "import os, signal, sys; from pathlib import Path; from infra.artifacts import staged\n"
        "os.getpid, pid = lambda: 4194305, os.getpid()\n"
        "with staged(Path(sys.argv[1])) as d:\n"
        "    (d / 'half').write_text('x'); print(d, flush=True); sys.stdin.read(1)\n"
        "    if sys.argv[2] == 'dies': os.kill(pid, signal.SIGKILL)"
    )
    with running_python(script, tmp_path / "final", "ends") as (living, half_made):
        with running_python(script, tmp_path / "other", "dies") as (killed, leftover):
            killed.communicate("x")
        assert killed.returncode == -9
        assert Path(leftover).is_dir()
        assert sweep_staging(tmp_path) == [Path(leftover)]
        assert Path(half_made, "half").read_text() == "x"
        living.communicate("x")
        assert living.returncode == 0
    assert [path.name for path in tmp_path.iterdir()] == ["final"]


def test_a_directory_that_was_set_aside_when_the_process_died_is_put_back(tmp_path: Path) -> None:
    aside = tmp_path / ".aside-my-final-0123abcd0123abcd"
    aside.mkdir()
    (aside / "old").write_text("old")
    sweep_staging(tmp_path)
    assert (tmp_path / "my-final" / "old").read_text() == "old"


def test_an_artifact_opens_only_with_the_files_it_was_published_with(tmp_path: Path) -> None:
    final = make(tmp_path / "a dir", "one")
    artifact = publish(final, "target")
    assert artifact.path == final
    assert open_artifact(Artifact.model_validate_json(artifact.model_dump_json())) == final
    make(final, "two")
    with pytest.raises(ValueError, match="the reference says"):
        open_artifact(artifact)
    (final / "a.txt").write_text("six")
    with pytest.raises(ValueError, match=r"a\.txt has sha256"):
        open_artifact(artifact)


def test_a_reference_to_another_scheme_or_with_a_short_hash_is_refused() -> None:
    for fields in ({"uri": "s3://a", "sha256": "0" * 64}, {"uri": "file:///a", "sha256": "0"}):
        with pytest.raises(ValueError, match="string_pattern_mismatch|should match pattern"):
            Artifact(kind="rows", **fields)


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


NO_MANIFEST = "manifest.json is not a manifest of format version 1.*"


@pytest.mark.parametrize(
    ("file", "content", "fault"),
    [
        ("weights.bin", "abd", r"weights\.bin has sha256"),
        ("weights.bin", "ab", r"weights\.bin has 2 bytes, the manifest says 3"),
        ("extra.py", "", r"extra\.py is extra"),
        ("manifest.json", '{"format_version": 2, "files": {}}', f"{NO_MANIFEST}format_version"),
        ("manifest.json", '{"format_version": 1}', f"{NO_MANIFEST}files"),
        ("manifest.json", '{"format_version": 1, "files": {"a": {"sha256": "0"}}}', f"{NO_MANIFEST}files.a.sha256"),
        ("manifest.json", '{"format_version": 1, "fi', f"{NO_MANIFEST}Invalid JSON"),
    ],
)
def test_each_fault_is_refused_with_the_name_of_the_file(checkpoint, file, content, fault) -> None:
    (checkpoint / file).write_text(content)
    with pytest.raises(ValueError, match=fault):
        check_manifest(checkpoint)


@pytest.mark.parametrize(
    ("file", "fault"), [("weights.bin", r"weights\.bin is missing"), ("manifest.json", r"has no manifest\.json")]
)
def test_what_is_missing_is_named(checkpoint: Path, file: str, fault: str) -> None:
    (checkpoint / file).unlink()
    with pytest.raises(ValueError, match=fault):
        check_manifest(checkpoint)


def test_what_is_no_directory_gets_no_manifest(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is not a directory"):
        write_manifest(tmp_path / "absent")


def test_a_symbolic_link_is_refused_when_writing_and_when_checking(checkpoint: Path) -> None:
    (checkpoint / "link").symlink_to("/etc/hostname")
    for function in (write_manifest, check_manifest):
        with pytest.raises(ValueError, match="link is neither a regular file nor a directory"):
            function(checkpoint)


def test_a_link_to_weights_is_listed_by_what_it_leads_to(checkpoint: Path, tmp_path: Path) -> None:
    weights = checkpoint / "model.safetensors"
    weights.write_bytes(b"weights")
    digest = write_manifest(checkpoint)
    own = weights.rename(tmp_path / "own.bin")
    weights.symlink_to(own)
    assert check_manifest(checkpoint) == write_manifest(checkpoint) == digest
    own.write_bytes(b"weighst")
    with pytest.raises(ValueError, match=r"model\.safetensors has sha256"):
        check_manifest(checkpoint)
    own.unlink()
    with pytest.raises(ValueError, match=r"model\.safetensors leads to .*own\.bin, which is not there"):
        check_manifest(checkpoint)
    weights.unlink()
    weights.symlink_to("weights.bin")
    with pytest.raises(ValueError, match=r"model\.safetensors is neither a regular file nor a directory"):
        check_manifest(checkpoint)


def age(path: Path, seconds: float) -> None:
    """Let a file have been written earlier, as one that took minutes to write was."""
    changed_s = path.stat().st_mtime - seconds
    os.utime(path, (changed_s, changed_s))


def overwrite(path: Path, content: bytes) -> None:
    """Write to a file, and let it be as old as it was."""
    changed_ns = path.stat().st_mtime_ns
    path.write_bytes(content)
    os.utime(path, ns=(changed_ns, changed_ns))


def copied(target: Path, to: Path, left_out: str = "") -> Path:
    return Path(shutil.copytree(target, to, ignore=shutil.ignore_patterns(left_out)))


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


def test_a_target_of_140_gb_that_was_hashed_once_is_opened_and_described_without_reading_it(tmp_path, tiny_target):
    target = copied(tiny_target, tmp_path / "target", "*.safetensors")
    weights = target / "model.safetensors"
    with weights.open("wb") as file:
        file.truncate(140 * GIB)
    age(weights, 60)
    remember(weights, "ab" * 32)
    entries = {
        path.name: artifacts.FileEntry(sha256=file_sha256(path, remembered=True), bytes=path.stat().st_size)
        for path in target.iterdir()
        if path.name != "manifest.json"
    }
    (target / "manifest.json").write_text(artifacts.Manifest(files=entries).model_dump_json())
    with reading_at_most(MIB):
        artifact = publish(target, "target")
        card = describe(open_artifact(artifact))
    assert artifact.sha256 == artifacts.Manifest(files=entries).digest()
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
    file.write_bytes(bytes(artifacts.REMEMBERED_BYTES))
    age(file, -3600)  # by a server's clock, which is ahead
    before = file_sha256(file, remembered=True)
    overwrite(file, b"1" * artifacts.REMEMBERED_BYTES)
    assert file_sha256(file, remembered=True) != before


def test_who_asks_for_the_bytes_gets_them_read(large: Path) -> None:
    overwrite(large / "weights.bin", b"1" * MIB)  # whoever did this meant it
    check_manifest(large, remembered=True)
    with pytest.raises(ValueError, match=r"weights\.bin has sha256"):
        check_manifest(large)


def test_weights_that_are_younger_than_their_manifest_are_described_as_they_are(tiny_target, tmp_path) -> None:
    target = copied(tiny_target, tmp_path / "target")
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


def fill(directory: Path) -> None:
    (directory / "file").write_bytes(bytes(100 * KIB))


def check(directory: Path) -> None:
    if (directory / "file").stat().st_size != 100 * KIB:
        raise ValueError("torn")


def fetch(cache: Path, name: str, owner: str, limit_kib: float = 250) -> Path:
    return fetched(cache / "draft" / name, fill, check, limit_kib / 2**20, owner)


def names(cache: Path) -> list[str]:
    return sorted(path.name for path in (cache / "draft").glob("[!.]*"))


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "compiled").write_bytes(bytes(KIB * KIB))  # no version: neither counted nor removed
    return tmp_path


def test_beyond_its_limit_the_cache_loses_what_was_used_longest_ago(cache: Path) -> None:
    for name in ("1", "2", "1", "3"):
        fetch(cache, name, "me")
        release("me")
    assert names(cache) == ["1", "3"]
    assert (cache / "other" / "compiled").is_file()


def test_what_is_held_stays_and_what_is_let_go_makes_room(cache: Path) -> None:
    held = [fetch(cache, name, "me") for name in ("1", "2", "3")]
    assert names(cache) == ["1", "2", "3"]
    release("me", but=held[1:])
    hold(held[1], "another")
    fetch(cache, "4", "me")
    assert names(cache) == ["2", "3", "4"]
    release("me")
    fetch(cache, "5", "me")
    assert names(cache) == ["2", "5"]
    release("me")
    release("another")


def test_what_another_process_holds_stays_until_it_dies(cache: Path) -> None:
    path = fetch(cache, "1", "me")
    release("me")
    script = "import sys; from pathlib import Path; from infra.artifacts import hold\n"
    script += "hold(Path(sys.argv[1])); print('held', flush=True); sys.stdin.read()"
    with running_python(script, path):
        assert not remove_unheld(path)
        fetch(cache, "2", "me", limit_kib=50)
        release("me")
        assert names(cache) == ["1", "2"]
    assert remove_unheld(path)
    assert names(cache) == ["2"]


def test_a_torn_copy_is_fetched_again_and_a_fetch_that_fails_leaves_nothing(cache: Path) -> None:
    path = fetch(cache, "1", "me")
    (path / "file").write_bytes(b"torn")
    assert fetch(cache, "1", "me") == path
    check(path)

    def fail(directory: Path) -> None:
        fill(directory)
        raise ValueError("not what was registered")

    with pytest.raises(ValueError, match="not what was registered"):
        fetched(cache / "draft" / "2", fail, check, 1.0)
    assert names(cache) == ["1"]
    release("me")
