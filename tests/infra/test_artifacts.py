from pathlib import Path

import pytest

from infra.artifacts import Artifact, open_artifact, publish, staged, sweep_staging
from infra.manifest import check_manifest
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
