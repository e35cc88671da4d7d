import hashlib
import json
from pathlib import Path

import pytest

from infra.artifacts import (
    Artifact,
    check_manifest,
    file_sha256,
    open_artifact,
    publish,
    staged,
    write_manifest,
)
from infra.files import sweep_staging
from tests.infra.rows import running_python


def test_a_staged_directory_appears_whole_with_a_manifest(tmp_path: Path) -> None:
    final = tmp_path / "parents" / "final"
    with staged(final) as directory:
        (directory / "a.txt").write_text("new")
        assert not final.exists()
    assert (final / "a.txt").read_text() == "new"
    check_manifest(final)
    assert [path.name for path in final.parent.iterdir()] == ["final"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_an_exception_leaves_the_old_directory_and_nothing_else(tmp_path: Path, error: type[BaseException]) -> None:
    final = tmp_path / "final"
    with staged(final) as directory:
        (directory / "a.txt").write_text("old")
    with pytest.raises(error), staged(final) as directory:
        (directory / "a.txt").write_text("new")
        raise error
    assert (final / "a.txt").read_text() == "old"
    assert list(tmp_path.iterdir()) == [final]


def test_an_existing_directory_is_replaced(tmp_path: Path) -> None:
    final = tmp_path / "final"
    for content in ("old", "new"):
        with staged(final) as directory:
            (directory / f"{content}.txt").write_text(content)
    assert sorted(path.name for path in final.iterdir()) == ["manifest.json", "new.txt"]
    assert list(tmp_path.iterdir()) == [final]


def test_what_a_killed_process_left_is_swept_and_living_processes_are_left_alone(tmp_path: Path) -> None:
    # A process of another container has an id that is nobody's here.
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
    final = tmp_path / "a dir"
    with staged(final) as directory:
        (directory / "a.txt").write_text("one")
    artifact = publish(final, "target")
    assert artifact.path == final
    assert open_artifact(Artifact.model_validate_json(artifact.model_dump_json())) == final
    with staged(final) as directory:
        (directory / "a.txt").write_text("two")
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


def test_a_link_to_weights_is_listed_by_what_it_leads_to(checkpoint: Path, tmp_path: Path) -> None:
    (checkpoint / "model.safetensors").write_bytes(b"weights")
    digest = write_manifest(checkpoint)
    own = (checkpoint / "model.safetensors").rename(tmp_path / "own.bin")
    (checkpoint / "model.safetensors").symlink_to(own)
    assert check_manifest(checkpoint) == write_manifest(checkpoint) == digest
    own.write_bytes(b"weighst")
    with pytest.raises(ValueError, match=r"model\.safetensors has sha256"):
        check_manifest(checkpoint)
    own.unlink()
    with pytest.raises(ValueError, match=r"model\.safetensors leads to .*own\.bin, which is not there"):
        check_manifest(checkpoint)
    (checkpoint / "model.safetensors").unlink()
    (checkpoint / "model.safetensors").symlink_to("weights.bin")
    with pytest.raises(ValueError, match=r"model\.safetensors is neither a regular file nor a directory"):
        check_manifest(checkpoint)
