from pathlib import Path

import pytest

from infra.cache import fetched, hold, release, remove_unheld
from tests.infra.rows import running_python

KIB = 1 << 10


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
    script = "import sys; from pathlib import Path; from infra.cache import hold\n"
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
